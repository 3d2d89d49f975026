"""MLX-LM's adapters: `adapters.safetensors` and an `adapter_config.json` of its own kind.

    <module>.lora_a        [in, rank]
    <module>.lora_b        [rank, out]

delta = scale * A @ B, so both are transposed against PEFT's, and the scale is given as it is.
Experts' are not: see adapter_store.checkpoint.peft.experts. `<module>` is the module's path in
MLX-LM's model, by Hugging Face's names and without a prefix. The config has the arguments of the
training command. What is computed follows from

    fine_tune_type         lora; dora and full are refused
    lora_parameters        rank, scale, keys (modules, by their path within a layer or in the model;
                           none: all linear ones of a layer). An alpha was written for a year and
                           never used, since the scale was beside it
    num_layers             the last so many layers are adapted; lora_layers before 0.19; 0, -1: all

and from nothing else in it, all of which is known or refused, as of PEFT's config.

Sources: mlx_lm/tuner/utils.py (`load_adapters`, `linear_to_lora_layers`), mlx_lm/tuner/lora.py and
mlx_lm/lora.py of MLX-LM 0.32; github.com/ml-explore/mlx-lm pull 65 and mlx-examples issues 622 and
982 on alpha. Of its LoRA on an embedding, that on a tied head is a part, which the files do not
tell: refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.config_values import (
    invalid_value,
    read_names,
    read_number,
    read_rank,
    read_text,
)
from adapter_store.checkpoint.peft.fields import check_unknown
from adapter_store.checkpoint.peft.module_patterns import (
    ALL_LINEAR,
    MatchBudget,
    ModuleMatcher,
    PatternTable,
)
from adapter_store.checkpoint.peft.tensor_keys import TensorKey, is_module, target_of
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.weights import Changes
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import CONFIG_FILE, MLX_WEIGHTS_FILE
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind

HONOURED = frozenset({"model", "fine_tune_type", "use_dora", "lora_parameters"})
LAYER_KEYS = ("num_layers", "lora_layers")

NO_EFFECT = frozenset(
    {
        *("train", "test", "data", "seed", "optimizer", "optimizer_config", "learning_rate"),
        *("lr_schedule", "batch_size", "iters", "val_batches", "test_batches", "max_seq_length"),
        *("steps_per_report", "steps_per_eval", "save_every", "steps_per_save", "mask_prompt"),
        *("grad_checkpoint", "grad_accumulation_steps", "clear_cache_threshold", "config"),
        *("adapter_path", "adapter_file", "resume_adapter_file", "report_to", "project_name"),
        *("wandb", "hf_dataset", "prompt_feature", "completion_feature", "chat_feature"),
        *("text_feature", "trust_remote_code", "verbose"),
    }
)
"""How it was trained. Weights that training was resumed from are in the saved ones."""

PARAMETERS = frozenset({"rank", "scale", "dropout", "keys", "alpha"})
"""Known keys of lora_parameters: dropout drops nothing at inference, and alpha is not used."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[ab])")
_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<index>\d{1,9})\.")
_EMBEDDINGS = re.compile(r"(?:.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings)")


def parse_mlx_config(fields: Mapping[str, Any], limits: CheckpointLimits) -> AdapterConfig:
    """Checks the parsed content of the file. Raises InvalidAdapter with the key as its subject."""
    if "peft_type" in fields:
        raise invalid_value(
            "peft_type",
            fields["peft_type"],
            f"PEFT's config, next to {MLX_WEIGHTS_FILE}, which MLX-LM saves",
        )
    _check_kind(fields)
    parameters = fields.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise invalid_value("lora_parameters", parameters, "not a map of MLX-LM's parameters")
    known = HONOURED | NO_EFFECT | {*LAYER_KEYS}
    allowed = limits.allowed_config_keys
    ignored = check_unknown(fields, known, CONFIG_FILE, allowed)
    ignored += check_unknown(parameters, PARAMETERS, f"{CONFIG_FILE}: lora_parameters", allowed)
    budget = MatchBudget(limits.max_match_seconds)
    if "scale" not in parameters:
        raise invalid_value(
            "scale", None, "MLX-LM needs it in lora_parameters, and never computes it of an alpha"
        )
    return AdapterConfig(
        base_model=read_text(fields, "model"),
        rank=read_rank("rank", parameters.get("rank"), limits),
        alpha=0.0,
        use_rslora=False,
        rank_pattern=PatternTable("rank_pattern", {}, budget),
        alpha_pattern=PatternTable("alpha_pattern", {}, budget),
        modules=ModuleMatcher(_keys(parameters), (), (), (), budget),
        ignored_keys=tuple(sorted(ignored)),
        scale=read_number("scale", parameters["scale"], "the scale"),
        last_layers=_last_layers(fields),
    )


def parse_mlx_key(key: str) -> TensorKey:
    """Parses a tensor's name.

    Raises InvalidAdapter TENSOR_UNKNOWN (subject: the name): the tensor would stay unused.
    """
    match = _TENSOR.fullmatch(key)
    module = match["module"] if match else ""
    if match is None or not is_module(module):
        why = "DoRA is not supported" if key.endswith(".m") else "weights are .lora_a and .lora_b"
        raise InvalidAdapter(
            f"{key}: not a LoRA weight of MLX-LM ({why})", subject=key, reason="TENSOR_UNKNOWN"
        )
    if _EMBEDDINGS.fullmatch(module):
        raise InvalidAdapter(
            f"{key}: LoRA of MLX-LM on an embedding is not supported: where the head is tied to it "
            "MLX-LM adapts the head, too; train without this key, or with PEFT",
            subject=key,
            reason="TENSOR_UNKNOWN",
        )
    side = SegmentKind.A if match["side"] == "a" else SegmentKind.B
    return TensorKey(target_of(module), module, TargetKind.LINEAR, side, "", is_transposed=True)


def check_selected(targets: Iterable[Changes], config: AdapterConfig) -> None:
    """Checks that MLX-LM would adapt all of the targets: modules that its keys name by their whole
    path, and those within the last `config.last_layers` layers that are named by theirs in a layer.

    Raises InvalidAdapter TARGET_NOT_SELECTED, with a tensor as its subject.
    """
    keys: str | Collection[str] = config.modules.fields["target_modules"]
    named = frozenset(() if isinstance(keys, str) else keys)
    layers: dict[int, Changes] = {}
    for target in targets:
        match = _LAYER.match(target.module)
        if target.module in named:
            continue
        if match is None or (named and target.module[match.end() :] not in named):
            raise _not_selected(target, f"the config's keys do not name {target.module}")
        layers.setdefault(int(match["index"]), target)
    if config.last_layers and layers and max(layers) - min(layers) >= config.last_layers:
        raise _not_selected(
            layers[min(layers)],
            f"the config adapts the last {config.last_layers} layers, and there are weights for "
            f"layers {min(layers)} to {max(layers)}",
        )


def _not_selected(target: Changes, detail: str) -> InvalidAdapter:
    _role, record = next(target.records())
    key = record.key
    return InvalidAdapter(
        f"{key}: {detail}, so it would stay unused", subject=key, reason="TARGET_NOT_SELECTED"
    )


def _check_kind(fields: Mapping[str, Any]) -> None:
    kind = fields.get("fine_tune_type", "lora")
    if kind == "dora" or fields.get("use_dora") not in (None, False):
        key = "fine_tune_type" if kind == "dora" else "use_dora"
        raise invalid_value(
            key,
            fields[key],
            "DoRA rescales the base weight; train with lora",
            "CONFIG_UNSUPPORTED",
        )
    if kind == "full":
        raise invalid_value(
            "fine_tune_type",
            kind,
            "these are weights of the base model, not of an adapter",
            "CONFIG_UNSUPPORTED",
        )
    if kind != "lora":
        raise invalid_value("fine_tune_type", kind, "only lora is known", "CONFIG_UNSUPPORTED")


def _keys(parameters: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Returns the adapted modules as a matcher takes them."""
    if parameters.get("keys") is None:
        return ALL_LINEAR
    keys = read_names(parameters, "keys")
    if isinstance(keys, str) or not keys:
        raise invalid_value("keys", parameters["keys"], "not a list of modules")
    return keys


def _last_layers(fields: Mapping[str, Any]) -> int:
    """Returns how many layers are adapted, 0 for all."""
    given = {key: fields[key] for key in LAYER_KEYS if fields.get(key) is not None}
    if not given:
        raise invalid_value("num_layers", None, "the number of adapted layers is missing")
    for key, value in given.items():
        if type(value) is not int or value != next(iter(given.values())):
            raise invalid_value(key, value, "not one number of layers")
    return max(0, next(iter(given.values())))
