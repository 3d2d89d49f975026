"""A toy of a mixer with a recurrent state: a decayed sum of values.

    state = sigmoid(decay) * state + value(x)       [hidden size], fp32
    mixer(x) = out(state)

A Llama whose even layers have it is described, listed and computed by the functions here; the same
model in transformers is the oracle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.backends import torch_needs
from inference_svc.backends.torch import TorchFactory
from inference_svc.model import transformer, walk
from inference_svc.model.architectures import Family, families, llama
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder, Member, Projection, Recurrence, layer_path
from inference_svc.model.operations import Listing, Numbers, Op, Project, Value, WeightSpec
from inference_svc.model.step import Step

NAME = "DecayedSumForCausalLM"
VOCAB_SIZE = 64


@dataclass(frozen=True, slots=True)
class DecayedSum(Recurrence):
    """`decay` is the tensor with a number for each element of the state."""

    value: Projection
    decay: str

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.value.out_features,),)


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Op):
    """Adds each token's values to the state of its sequence; the output is the state then."""

    mixer: DecayedSum
    decay: Numbers = field(init=False)

    def __post_init__(self) -> None:
        assert self.layer is not None
        name = layer_path(self.layer, self.mixer.decay)
        object.__setattr__(self, "decay", Numbers(name, self.mixer.value.out_features))

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.decay,)


def list_operations(walk: Listing, layer: int, mixer: DecayedSum, x: Value) -> Value:
    size = mixer.value.out_features
    values, folded = walk.value("values", size), walk.value("folded", size)
    walk.ops.append(Project((x,), values, layer, mixer.value))
    walk.ops.append(Fold((values,), folded, layer, mixer))
    return folded


def fold(op: Fold, step: Step) -> Tensor:
    plan, values = step.inputs.recurrent, step.values[op.inputs[0]]
    numbers = step.weights.numbers_of(op.decay)
    assert plan is not None
    assert op.layer is not None
    assert numbers is not None
    (states,) = plan.states.layers[op.layer]
    out = []
    start = 0
    for read, written, count in plan.segments:
        part = values[start : start + count].float()
        folded = _folded(part, torch.sigmoid(numbers), states[read])
        states[written] = folded[-1]
        out.append(folded)
        start += count
    return torch.cat(out).to(values.dtype)


def _folded(values: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """values: [T, size]; returns the state behind each of them, [T, size]."""
    found = []
    for value in values:
        state = decay * state + value
        found.append(state)
    return torch.stack(found)


def fold_bytes(op: Fold, own: Any) -> int:
    """The values, and a state behind each of them, twice, in fp32."""
    return 3 * 4 * own.elements(op)


def describe(config: ConfigReader) -> Decoder:
    decoder = llama.describe(config)
    size = decoder.hidden_size
    value, out = (
        Projection(name, (Member(f"self_attn.{name}", size),), size) for name in ("value", "out")
    )
    mixer = DecayedSum(out=out, value=value, decay="self_attn.decay")
    blocks = tuple(
        replace(block, mixer=mixer) if layer % 2 == 0 else block
        for layer, block in enumerate(decoder.blocks)
    )
    return replace(decoder, blocks=blocks)


class DecayedSumModule(nn.Module):
    """The mixer in the oracle, which computes all tokens at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.decay = nn.Parameter(torch.linspace(-1.0, 4.0, size))

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        values, decay = self.value(hidden_states), torch.sigmoid(self.decay)
        states = [_folded(each, decay, torch.zeros(each.shape[1])) for each in values]
        return self.out(torch.stack(states)), None


def make_oracle() -> Any:
    """Returns a model of four layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers[::2]:
        layer.self_attn = DecayedSumModule(config.hidden_size)
    return model


def save_oracle(model: Any, folder: Path) -> None:
    """Saves a checkpoint, as the architecture that `register` makes known."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [NAME]}))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the architecture known, and its mixer to torch's backend."""
    known = families()["LlamaForCausalLM"]
    family = Family(NAME, describe, reads=known.reads)
    monkeypatch.setitem(families(), NAME, family)  # type: ignore[arg-type]
    monkeypatch.setitem(walk.MIXERS, DecayedSum, list_operations)
    monkeypatch.setitem(transformer.COMPUTE, Fold, fold)
    monkeypatch.setitem(torch_needs.OWN_BYTES, Fold, fold_bytes)
    features = TorchFactory.features | {"decayed_sum"}
    monkeypatch.setattr(TorchFactory, "features", features)
