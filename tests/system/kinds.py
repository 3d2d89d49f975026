"""Adapters of every kind, of one random model: on disk as we serve them, as PEFT's models the
oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from inference_svc.api.generate_call import activation_of
from inference_svc.core import Part, Sum
from inference_svc.engine.transport.messages import Output
from tests.support.models.parity import RecordingSampler, prompts, relative_rms
from tests.support.models.quantised import make_packed
from tests.support.models.zoo import (
    ALL,
    PARAMETERS,
    VOCAB,
    AdapterSpec,
    Zoo,
    adapted,
    make_model,
    quiet,
)
from tests.system.engines import Running

ROWS = [0, 3, 50, 127]
INVOCATION, ADDED = (5, 9, 5), (VOCAB, VOCAB + 1)
PLAIN = (AdapterSpec("plain", 8, ALL), AdapterSpec("small", 3, ["q_proj", "down_proj"]))
SUM, PARTS = "sum", (("plain", 0.75), ("small", 0.5))
"""A request's own weights of two adapters."""
ALORA, TOKENS = "alora", "added tokens"
OWN = (
    AdapterSpec("lookup", 2, ["embed_tokens", "k_proj"]),
    AdapterSpec("lora_bias", 4, ALL, {"lora_bias": True}),
    # PEFT saves what ends with it: norms of layers, of queries and keys, and the last one.
    AdapterSpec("norms", 4, ["q_proj"], {"modules_to_save": ["norm"]}),
    AdapterSpec("head", 4, ["down_proj"], {"modules_to_save": ["lm_head"]}),
    AdapterSpec("embedding", 4, ["v_proj"], {"modules_to_save": ["embed_tokens"]}),
    AdapterSpec("rows", 4, ["v_proj"], {"trainable_token_indices": ROWS}),
    AdapterSpec("dora", 6, ALL, {"use_dora": True}),
    AdapterSpec("dora of both ends", 4, ["embed_tokens", "o_proj"], {"use_dora": True}),
    AdapterSpec("dora and the head", 4, ALL, {"use_dora": True, "modules_to_save": ["lm_head"]}),
    AdapterSpec(
        "everything",
        *(5, ALL),
        {"lora_bias": True, "modules_to_save": ["norm", "lm_head", "embed_tokens"]},
    ),
    AdapterSpec(
        ALORA,
        *(8, ALL),
        {"alora_invocation_tokens": list(INVOCATION), "task_type": "CAUSAL_LM"},
    ),
    AdapterSpec(TOKENS, 4, ["q_proj"]),
)
UNTIED = (
    AdapterSpec(
        "rows of both",
        *(3, ["o_proj"]),
        {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [1, 77]}},
    ),
    AdapterSpec("bias=lora_only", 4, ["q_proj", "down_proj"], {"bias": "lora_only"}),
    AdapterSpec("bias=all", 4, ["q_proj", "down_proj"], {"bias": "all"}),
)
"""Of a model with biases and a head of its own."""
EXPERTS = "experts"
"""An adapter of all experts and their router, of a model that has them."""


def shake(model: Any) -> None:
    """Gives what trainers train besides A and B values of its own."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter += torch.randn_like(parameter) * 0.15
        elif "trainable_tokens_delta" in name:
            parameter += torch.randn_like(parameter) * 0.3
        elif "lora_magnitude" in name:
            parameter *= 1 + 0.2 * torch.rand_like(parameter)
        elif name.endswith(".bias") and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


@dataclass
class Kinds(Zoo):
    """A model of its own for each adapter: what they have besides A and B, PEFT shares."""

    references: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """What requests ask for: the base model, each adapter, and a sum."""
        return ["", *self.adapter_dirs, SUM]

    def of(self, adapter: str) -> Zoo:
        return replace(self, reference=self.references[adapter or PLAIN[0].name])

    def prompt_of(self, adapter: str, tokens: Sequence[int]) -> list[int]:
        """Returns a prompt of these tokens that has what makes the adapter other than the rest: its
        invocation, or tokens that it adds."""
        middle = len(tokens) // 2
        special = {ALORA: INVOCATION, TOKENS: ADDED}.get(adapter, ())
        return [*tokens[:middle], *special, *tokens[middle:]]

    def submit(
        self, running: Running, name: str, prompt: Sequence[int], adapter: str, **options: Any
    ) -> None:
        submit(running, name, prompt, adapter, **options)


def submit(
    running: Running, name: str, prompt: Sequence[int], adapter: str, **options: Any
) -> None:
    """Submits as `GenerateCall.to_requests` does; in `prompt` an aLoRA is invoked."""
    digest: str | Sum = adapter
    if adapter == SUM:
        parts = (Part(running.digests[part], scale) for part, scale in PARTS)
        digest = Sum(tuple(parts))
    activation = activation_of(prompt, INVOCATION) if adapter == ALORA else 0
    assert activation is not None
    running.submit(name, prompt, digest, activation=activation, **options)


def to_float8(model: Any) -> None:
    """Rounds A and B, with the adapter's scale, to values that float8 images have."""
    for layer in (each for each in model.modules() if isinstance(each, LoraLayer)):
        for scales, stores in (
            (dict.fromkeys(layer.scaling, 1.0), (layer.lora_A, layer.lora_embedding_A)),
            (layer.scaling, (layer.lora_B, layer.lora_embedding_B)),
        ):
            for store in stores:
                for name, part in store.items():
                    values = getattr(part, "weight", part)
                    values.copy_(_rounded(values * scales[name]) / scales[name])


def _rounded(values: torch.Tensor) -> torch.Tensor:
    scale = 2.0 ** math.ceil(math.log2(values.abs().max().item() / 448))
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def shake_to_float8(model: Any) -> None:
    shake(model)
    to_float8(model)


def kinds_of(kind: str) -> list[AdapterSpec]:
    """Returns adapters of all kinds that the model may have; biases are Qwen 3's."""
    own = [*OWN, *(UNTIED if kind == "qwen3" else ())]
    if kind in PARAMETERS:
        options = {"target_parameters": list(PARAMETERS[kind])}
        own.append(AdapterSpec(EXPERTS, 4, ["q_proj", "o_proj"], options))
    return own


def make_kinds(
    kind: str,
    folder: Path,
    train: Callable[[Any], None] = shake,
    own: Sequence[AdapterSpec] | None = None,
    form: str = "",
) -> Kinds:
    """Makes plain adapters, and `own` ones in addition: by default of all kinds. The base model has
    its weights in one of `saved_weights.FORMATS`, if `form` names one."""
    base = make_packed(form, kind, folder)[1] if form else make_model(kind, folder / "model")
    references, dirs = {}, {}
    for specs in (PLAIN, *((spec,) for spec in (kinds_of(kind) if own is None else own))):
        has_tokens = specs[0].name == TOKENS
        model = _with_tokens(base) if has_tokens else copy.deepcopy(base)
        made = folder / "adapters" / specs[0].name
        reference = adapted(model, kind, made, specs, train, save_embedding_layers=has_tokens)
        for spec in specs:
            references[spec.name], dirs[spec.name] = reference, made / spec.name
    adapters, weights = map(list, zip(*PARTS, strict=True))
    with quiet():
        references["plain"].add_weighted_adapter(adapters, weights, SUM, combination_type="cat")
    references[SUM] = references["plain"]
    return Kinds(kind, folder / "model", base, dirs, references)


def _with_tokens(base: Any) -> Any:
    """Returns a copy with rows for more tokens, which are said as often as others."""
    model = copy.deepcopy(base)
    model.resize_token_embeddings(VOCAB + len(ADDED), mean_resizing=False)
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight[VOCAB:] = torch.randn(len(ADDED), part.weight.shape[1]) * 0.15
    return model


def begin(zoo: Zoo, start: Callable, **settings: Any) -> tuple[Running, RecordingSampler]:
    """Starts an engine whose logits are kept."""
    if isinstance(zoo, Kinds):
        settings["max_added_tokens"] = len(ADDED)
    running = start(zoo, max_model_len=512, **settings)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner.sampler = recorder
    return running, recorder


def check(
    zoo: Kinds,
    name: str,
    prompt: list[int],
    tokens: list[int],
    last: Output,
    recorded: list[torch.Tensor],
) -> None:
    """Requires the oracle's tokens, from its logits; of tokens that are not the adapter's none."""
    assert last.error is None, last.error
    given, start_of_answer = prompt + tokens[:-1], len(prompt) - 1
    expected = zoo.of(name).logits(name, given, torch.float32)[start_of_answer:]
    num_known = expected.shape[1]
    for logits in recorded:
        assert logits[num_known:].isneginf().all(), name
    got = torch.stack([logits[:num_known] for logits in recorded])
    assert relative_rms(got, expected) < 1e-4, name
    assert tokens == expected.argmax(dim=-1).tolist(), name or "base"


NUM_TOKENS = 12


def compare(
    zoo: Kinds, start: Callable[..., Running], names: Sequence[str] = (), **settings: Any
) -> Running:
    """Adapters of these names, or all, together with the base model and a sum, in chunks."""
    running, recorder = begin(zoo, start, max_prefill_chunk=24, **settings)
    names = names or zoo.names
    asked = [zoo.prompt_of(*each) for each in zip(names, prompts(len(names)), strict=True)]
    for name, prompt in zip(names, asked, strict=True):
        zoo.submit(running, name or "base", prompt, name, max_tokens=NUM_TOKENS)
    for name, prompt in zip(names, asked, strict=True):
        key = name or "base"
        check(zoo, name, prompt, *running.result(key), recorder.logits[key])
    running.check_idle()
    return running


UNSHARED = {
    "dora": "DoRA magnitudes for q_proj",
    "dora of both ends": "DoRA magnitudes for o_proj",
    "dora and the head": "DoRA magnitudes for q_proj",
    "bias=all": "a bias of its own for o_proj",
}
"""Adapters of which each rank would need all outputs, and the reason of their refusal."""
