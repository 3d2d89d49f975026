"""What a recording holds is the same for every batch of its size: a step waits for nothing,
launches the same, and reads no memory that a later step would find moved, changed or freed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu_model.launches import (
    META,
    Launch,
    NotCapturable,
    Noted,
    launches,
    noted_kernels,
    storage_id,
)
from bench.gpu_model.step import tensors_of
from inference_svc.backends.cuda.backend import CudaBackend, PreparedStep
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.model.kv_caches import KVCaches
from kernels.elementwise import NormWeight, add_rms_norm, swiglu
from tests.support.gpu.features import FEATURES
from tests.support.gpu.models import Eager, Model, make_decoder, steps

pytestmark = pytest.mark.matrix

BASE, ALL, SOME = [-1] * 5, [0, 0, 1, 2, 2], [-1, -1, 0, 1, 1]


class Checked:
    """A backend whose every step is looked at."""

    def __init__(self, model: Model, transformer: Any = None) -> None:
        caches = model.caches()
        self.backend = model.fixed(Eager, is_warm=False, caches=caches, transformer=transformer)
        self.places = places_of(self.backend, model, caches)
        self.num_prompts = 0
        """Steps with prompts that are replayed."""
        self.recorded: dict[StepShape, list[tuple]] = {}

    def record(self) -> None:
        """Every step, while the inputs are padding, as in the warm-up."""
        shapes = self.backend.steps.shapes
        prompts = [
            StepShape(kind, num_tokens, num_rows, has_prompts=True)
            for kind, num_tokens, num_rows in product(
                StepKind, shapes.prompt_tokens, shapes.prompt_rows
            )
        ]
        for shape in [*shapes.decodes(), *prompts]:
            self.backend.steps.fill_padding(shape)
            with launches() as noted:
                self.backend.compute(shape)
            self.recorded[shape] = self.described(noted)

    def run(self, batch: Any) -> None:
        prepared: PreparedStep = self.backend.prepare(batch)
        with launches() as noted:
            self.backend.forward(prepared)
        found = self.described(noted)
        if prepared.shape is not None:
            self.num_prompts += prepared.shape.has_prompts
            wanted = self.recorded[prepared.shape]
            for one, other in zip(wanted, found, strict=False):
                assert one == other, "the recording computes something else"
            assert len(wanted) == len(found)
        with noted_kernels(lambda launch: None):
            self.backend.use_idle_time()

    def described(self, noted: Noted) -> list[tuple]:
        """All that a recording holds of each launch, tensors by where they lie."""

        def place(leaf: Any) -> Any:
            if isinstance(leaf, list | tuple):
                return tuple(map(place, leaf))
            if not isinstance(leaf, Tensor):
                return leaf
            at = noted.allocated.get(storage_id(leaf), self.places.get(storage_id(leaf)))
            assert at is not None, f"nobody keeps this for the recording: {leaf}"
            return at, leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype

        def describe(launch: Launch) -> tuple:
            arguments = {name: place(value) for name, value in launch.arguments.items()}
            return launch.name, launch.grid, arguments

        return [describe(launch) for launch in noted.launches]


def places_of(backend: CudaBackend, model: Model, caches: KVCaches) -> dict[int, str]:
    """What stays where it is, by storage."""
    layers = {} if backend.states is None else backend.states.layers
    states = [part for parts in layers.values() for part in parts]
    places = {storage_id(each): "weights" for each in tensors_of(model.transformer.weights)}
    named = {
        **{
            f"frequencies {index}": rotary.inverse_frequencies
            for index, rotary in enumerate(model.transformer.rotary.values())
        },
        **{
            f"columns to copy {index}": columns
            for index, columns in enumerate(model.transformer.columns.values())
        },
        **{f"states {index}": each for index, each in enumerate(states)},
        **{f"keys and values {index}": each.data for index, each in enumerate(caches.caches)},
        "page table": backend.steps.table.on_device,
        "arena": model.arena.flat,
        "table of adapters": model.arena.table.rows,
        "table of replaced weights": model.arena.table.weight_rows,
        "inputs": backend.steps.decodes.inputs.block._twin,
        "inputs of prompts": backend.steps.prompts.inputs.block._twin,
        "logits": backend.results.logits,
        "largest logits": backend.results.argmax,
    }
    if backend.results.choices is not None:
        named["chosen experts"] = backend.results.choices
    return places | {storage_id(tensor): name for name, tensor in named.items()}


def check_all(make: Callable[[], Checked]) -> None:
    checked = make()
    checked.record()
    for slots in (BASE, ALL, SOME):
        for batch in steps(slots):
            checked.run(batch)
    assert checked.num_prompts > 0


@pytest.fixture
def make_model(tmp_path):
    def make(feature: str) -> Model:
        description = make_decoder(feature, tmp_path)
        return Model.make(description, torch.float16, META)

    return make


@pytest.mark.parametrize("feature", FEATURES)
def test_a_recording_serves_every_batch(make_model, feature):
    model = make_model(feature)
    check_all(lambda: Checked(model))


class Planted:
    """A decoder that does something else besides."""

    def __init__(self, model: Model, plant: Callable[[Planted, Tensor], Any]) -> None:
        self.description = model.transformer.description
        self.model = model
        self.stray = torch.ones(1, device=META)
        self.num_calls = 0
        self._plant = plant

    @property
    def is_odd(self) -> int:
        return self.num_calls % 2

    @torch.inference_mode()
    def forward(self, inputs: Any, kv_cache: Any, lora: Any, choices: Any) -> Tensor:
        self.num_calls += 1
        logits = self.model.transformer.forward(inputs, kv_cache, lora, choices)
        self._plant(self, logits)
        return logits


WAITS = {
    "item": lambda _, x: x.sum().item(),
    "a condition": lambda _, x: bool(x.sum() > 0),
    "nonzero": lambda _, x: x.nonzero(),
    "a mask": lambda _, x: x[x > 0],
    "masked_select": lambda _, x: torch.masked_select(x, x > 0),
    "unique": lambda _, x: x.unique(),
    "equal": lambda _, x: torch.equal(x, x),
}
HOST = {
    "a copy to the CPU": lambda _, x: x.cpu(),
    "a copy from the CPU": lambda _, x: x[0].copy_(torch.zeros(x.shape[1])),
    "a constant of the CPU": lambda _, x: torch.tensor([1, 2]).to(x.device),
    "a kernel over the CPU's memory": lambda _, x: add_rms_norm(
        torch.zeros(1, x.shape[1]), None, NormWeight(x[0], 1e-5)
    ),
}
DIFFERENT = {
    "one operation more": lambda p, x: x.add_(1) if p.is_odd else None,
    "another operation": lambda p, x: x.add_(1) if p.is_odd else x.mul_(1),
    "another number": lambda p, x: x.mul_(p.num_calls),
    "another grid": lambda p, x: add_rms_norm(x[: 1 + p.is_odd], None, NormWeight(x[0], 1e-5)),
    "another constant": lambda p, x: swiglu(*[x.flatten()[None, : 4 + 4 * p.is_odd]] * 2),
    "another address": lambda p, x: x.add_(p.model.transformer.weights.embedding[p.is_odd, 0]),
}


def check_planted(model: Model, plant: Callable[[Any, Tensor], Any]) -> None:
    check_all(lambda: Checked(model, Planted(model, plant)))


@pytest.mark.parametrize("plant", [*WAITS, *HOST])
def test_finds_waiting_and_host_memory(make_model, plant):
    with pytest.raises(NotCapturable):
        check_planted(make_model("llama"), (WAITS | HOST)[plant])


@pytest.mark.parametrize("plant", DIFFERENT)
def test_finds_what_differs(make_model, plant):
    with pytest.raises(AssertionError, match="the recording computes something else"):
        check_planted(make_model("llama"), DIFFERENT[plant])


def test_finds_memory_that_nobody_keeps(make_model):
    with pytest.raises(AssertionError, match="nobody keeps this"):
        check_planted(make_model("llama"), lambda p, x: x.add_(p.stray))


def test_a_planted_step_that_does_nothing_passes(make_model):
    check_planted(make_model("llama"), lambda p, x: x.add_(1))
