"""Makes the table of support for each kind of content that a trainer may write.

For every cell it makes an adapter of a tiny model with PEFT and writes it in the trainer's form. It
then registers and plans the adapter with the store's code, for a server of this model, or of a
mixture of experts if the adapter has experts. Nothing is ignored: content that a server does not
apply is refused by name.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from adapter_store.api.convert import from_json
from adapter_store.checkpoint.features import Feature
from adapter_store.images.plan.check import Server, check_folder
from inference_svc.app import describe_layout
from inference_svc.config import InferenceSettings
from servicekit.settings.load import load_settings
from tests.support.models.trained import (
    PREFIX,
    WEIGHTS,
    Trainer,
    as_mlx,
    as_torchtune,
    edited,
    renamed,
    sharded,
)
from tests.support.models.zoo import AdapterSpec, make_model, make_zoo

Make = Callable[[Trainer], Path]
LAYER = f"{PREFIX}model.layers.0."
FIXTURES = Path(__file__).parent.parent / "tests/adapter_store/checkpoint/trainers"
_NAMED = re.compile(
    r"(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|trainable_tokens_delta)"
    r"((?:\.weight|\.bias)?)$"
)
"""The part of a key before an adapter's name in a state dict, and the part after it."""
RANK, HIDDEN = 4, 64
OUTSIDE, INSIDE, NUM_EXPERTS = 16, 12, 4
MIXTURE = {
    "hidden_size": OUTSIDE,
    "moe_intermediate_size": INSIDE,
    "num_experts": NUM_EXPERTS,
    "num_hidden_layers": 1,
}
"""The mixture of experts of the trainers' own adapters in FIXTURES."""
OF_MIXTURE = frozenset({Feature.EXPERTS, Feature.EXPERT_PARAMETERS})
"""Contents that only a mixture of experts can have."""


def saved(*, save_embedding_layers: bool | str = False, **options: Any) -> Make:
    """Saves an adapter with PEFT, with these options of its config and all trained parameters."""

    def make(trainer: Trainer) -> Path:
        adapted = trainer.adapt(**options)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                torch.nn.init.normal_(parameter)
        return trainer.save(adapted, "peft", save_embedding_layers=save_embedding_layers)

    return make


def written(target_modules: list[str], **tensors: tuple[int, ...]) -> Make:
    """Writes tensors of these shapes, as PEFT would for a model with such modules."""

    def make(trainer: Trainer) -> Path:
        folder = edited(saved()(trainer), target_modules=target_modules)
        values = {f"{LAYER}{name}.weight": torch.randn(shape) for name, shape in tensors.items()}
        save_file(values, folder / WEIGHTS)
        return folder

    return make


def of_parameters(trainer: Trainer) -> Path:
    """Writes A and B of all experts' parameters as PEFT 0.21 does, with the tensors of
    `gate_up_proj` nested in `down_proj`'s."""
    inside, outside = f"{LAYER}mlp.experts.base_layer.lora", f"{LAYER}mlp.experts.lora"
    all_ranks = NUM_EXPERTS * RANK
    folder = edited(
        saved()(trainer),
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    shapes = {
        f"{inside}_A.weight": (all_ranks, OUTSIDE),
        f"{inside}_B.weight": (2 * INSIDE, all_ranks),
        f"{outside}_A.weight": (all_ranks, INSIDE),
        f"{outside}_B.weight": (OUTSIDE, all_ranks),
    }
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(values, folder / WEIGHTS)
    return folder


CONTENTS: Mapping[Feature, Make] = {
    Feature.LINEAR: saved(),
    Feature.EMBEDDING: saved(target_modules=["embed_tokens"]),
    Feature.HEAD: saved(target_modules=["lm_head"]),
    Feature.FUSED: written(
        ["qkv_proj"],
        **{
            "self_attn.qkv_proj.lora_A": (RANK, HIDDEN),
            "self_attn.qkv_proj.lora_B": (2 * HIDDEN, RANK),
        },
    ),
    Feature.RSLORA: saved(use_rslora=True),
    Feature.RANK_PATTERN: saved(rank_pattern={"q_proj": 7}),
    Feature.ALPHA_PATTERN: saved(alpha_pattern={"q_proj": 3}),
    Feature.LAYERS: saved(layers_to_transform=[1]),
    Feature.TRANSPOSED: lambda trainer: edited(saved()(trainer), fan_in_fan_out=True),
    Feature.SHARDS: lambda trainer: sharded(saved()(trainer), trainer.folder / "sharded"),
    Feature.LORA_BIAS: saved(lora_bias=True),
    Feature.DORA: saved(use_dora=True),
    Feature.BIASES: saved(bias="lora_only"),
    Feature.NORMS: saved(modules_to_save=["norm"]),
    Feature.WHOLE_WEIGHTS: saved(modules_to_save=["lm_head"]),
    Feature.SAVED_ALONG: saved(
        target_modules=["q_proj", "embed_tokens"], save_embedding_layers="auto"
    ),
    Feature.TOKEN_ROWS: saved(trainable_token_indices=[5, 6]),
    Feature.ALORA: saved(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"),
    Feature.EXPERTS: written(
        ["gate_proj"],
        **{
            f"mlp.experts.{expert}.gate_proj.lora_{side}": shape
            for expert in range(NUM_EXPERTS)
            for side, shape in {"A": (RANK, OUTSIDE), "B": (INSIDE, RANK)}.items()
        },
    ),
    Feature.EXPERT_PARAMETERS: of_parameters,
}
"""An adapter with each kind of content, as PEFT saves it."""


def of_state_dict(make: Make) -> Make:
    """Names tensors as in a state dict, with the adapter's name and without PEFT's prefix."""

    def written(trainer: Trainer) -> Path:
        folder = make(trainer)
        named = {
            _NAMED.sub(r"\1.french\2", name.removeprefix(PREFIX)): value
            for name, value in load_file(folder / WEIGHTS).items()
        }
        save_file(named, folder / WEIGHTS)
        return folder

    return written


def of_tinker(make: Make) -> Make:
    def written(trainer: Trainer) -> Path:
        names = (f"{PREFIX}lm_head", f"{PREFIX}model.unembed_tokens")
        out = trainer.folder / "tinker"
        return renamed(make(trainer), out, *names, target_modules="all-linear")

    return written


def of_mlx(make: Make = CONTENTS[Feature.LINEAR], **fields: object) -> Make:
    """Writes A and B as MLX-LM does, an embedding's like all others; `fields` change its config."""

    def written(trainer: Trainer) -> Path:
        folder = make(trainer)
        for side in "AB":
            names = (f"lora_embedding_{side}", f"lora_{side}.weight")
            folder = renamed(folder, folder.with_name(f"plain {side}"), *names)
        return edited(as_mlx(folder, trainer.folder / "mlx"), **fields)

    return written


def fixture(name: str) -> Make:
    """Copies an adapter of a mixture of experts that a trainer's own library saved."""
    return lambda trainer: Path(shutil.copytree(FIXTURES / name, trainer.folder))


@dataclass(frozen=True, slots=True)
class Writer:
    """A column of the table: trainers of adapter_store.checkpoint.formats.readers with the same
    form, and the only contents that they write."""

    name: str
    trainers: tuple[str, ...]
    contents: Mapping[Feature, Make]


def _each(write: Callable[[Make], Make], *features: Feature) -> dict[Feature, Make]:
    return {feature: write(CONTENTS[feature]) for feature in features}


WRITERS = (
    Writer(
        "PEFT and trainers that use it",
        ("PEFT", "Transformers' Trainer, TRL", "Axolotl", "LLaMA-Factory", "Unsloth"),
        CONTENTS,
    ),
    Writer(
        "state dicts",
        ("your own trainer's state dict",),
        _each(of_state_dict, *(each for each in CONTENTS if each is not Feature.SHARDS)),
    ),
    Writer(
        "torchtune",
        ("torchtune",),
        _each(
            lambda make: lambda trainer: as_torchtune(trainer, make(trainer)),
            Feature.LINEAR,
            Feature.HEAD,
        ),
    ),
    Writer(
        "Tinker",
        ("Tinker",),
        {
            **_each(of_tinker, Feature.LINEAR, Feature.HEAD),
            Feature.EXPERTS: fixture("experts_tinker"),
        },
    ),
    Writer(
        "Megatron-Bridge",
        ("Megatron-Bridge",),
        _each(lambda make: make, Feature.LINEAR, Feature.EXPERTS, Feature.EXPERT_PARAMETERS),
    ),
    Writer(
        "MLX-LM",
        ("MLX-LM",),
        {
            **_each(of_mlx, Feature.LINEAR, Feature.HEAD, Feature.EMBEDDING),
            Feature.DORA: of_mlx(fine_tune_type="dora"),
            Feature.WHOLE_WEIGHTS: of_mlx(fine_tune_type="full"),
            Feature.EXPERTS: fixture("experts_mlx"),
        },
    ),
)


APPLIED = "applied"
NOT_WRITTEN = "-"


def verdicts() -> dict[Feature, dict[str, str]]:
    """Returns the verdict on each content by the writer's name: APPLIED, NOT_WRITTEN, or the
    refusal's reason."""
    torch.manual_seed(11)
    with tempfile.TemporaryDirectory() as name:
        zoo = make_zoo("qwen2", Path(name), [AdapterSpec("unused", 1, ["q_proj"])])
        trainer, dense = Trainer.load(zoo.model_dir), server_of(zoo.model_dir)
        mixture = mixture_server(Path(name) / "mixture")
        found: dict[Feature, dict[str, str]] = {}
        for feature in CONTENTS:
            server = mixture if feature in OF_MIXTURE else dense
            for writer in WRITERS:
                own = replace(trainer, folder=Path(name, feature.value, writer.name))
                cells = found.setdefault(feature, {})
                cells[writer.name] = _verdict(writer.contents.get(feature), own, server)
        return found


def _verdict(make: Make | None, trainer: Trainer, server: Server) -> str:
    if make is None:
        return NOT_WRITTEN
    report = check_folder(make(trainer), server=server)
    if report.refusal is not None:
        return f"refused: `{report.refusal.reason}`"
    assert report.server is not None
    if not report.server.refusals:
        return APPLIED
    first = report.server.refusals[0]
    if first.reason == "NOT_APPLIED":
        words = first.message.partition(", which this server does not apply")[0]
        return f"refused by the server: {words.removeprefix('it has ').removeprefix('it is ')}"
    return f"refused by the server: `{first.reason}`"


def mixture_server(folder: Path) -> Server:
    """Makes a mixture of experts in `folder`, and returns the description of its server."""
    make_model("qwen3-moe", folder, **MIXTURE)
    return server_of(folder)


def server_of(model_dir: Path, *flags: str) -> Server:
    """Returns the description of a server of this model with these flags."""
    settings = load_settings(InferenceSettings, ["--model", str(model_dir), *flags])
    return Server(*from_json(describe_layout(settings)))
