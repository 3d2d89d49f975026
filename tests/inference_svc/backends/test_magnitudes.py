"""Magnitudes are divided a part between every two steps; what cannot be divided fails alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.images.dtypes import DataType
from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import HEAD, IMAGE_FORMATS, ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.backends import magnitudes
from inference_svc.backends.arena import Arena
from inference_svc.backends.magnitudes import Divided, Magnitudes
from inference_svc.errors import AdapterUnusable, OutOfDeviceMemory
from servicekit.errors import Internal

IN, OUT, RANK = 64, 96, 4
A, B, MAGNITUDE = SegmentKind.A, SegmentKind.B, SegmentKind.MAGNITUDE
SHAPES = {A: (RANK, IN), B: (RANK, OUT), MAGNITUDE: (OUT,)}


class Weight:
    """The weight of a head; `fails` is called before rows of it are given."""

    def __init__(self) -> None:
        self.values = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
        self.fails: Callable[[], None] = lambda: None

    def rows(self, start: int, end: int) -> torch.Tensor:
        self.fails()
        return self.values[start:end]


class World:
    """Adapters with magnitudes of the head, in an arena."""

    def __init__(self) -> None:
        target = Target("lm_head", None, HEAD, TargetKind.LINEAR, IN, OUT)
        layout = ModelLayout("base", "0" * 64, torch.float32, IMAGE_FORMATS, (target,))
        self.arena = Arena(layout, 1 << 16, 4, 64, torch.device("cpu"))
        self.slots = Slots(1 << 16, 4)
        self.weight = Weight()
        weights: Any = SimpleNamespace(projections={HEAD: self.weight})
        self.magnitudes = Magnitudes(weights, self.arena)

    def add(self, digest: str) -> dict[SegmentKind, torch.Tensor]:
        """Begins with an adapter; returns views of what lies in the arena."""
        segments, end = [], 0
        for kind, shape in SHAPES.items():
            num_bytes = 4 * torch.Size(shape).numel()
            segments.append(Segment(0, kind, RANK, end, num_bytes, DataType.FLOAT32, shape))
            end += -(-num_bytes // 256) * 256
        header = ImageHeader(digest, digest, "layout", 2, end, tuple(segments))
        reservation = self.slots.reserve(header)
        assert reservation is not None
        found = self._views(reservation.resident)
        for values in found.values():
            values.copy_(torch.rand(values.shape) + 0.5)
        self.magnitudes.start(reservation.resident)
        return found

    def _views(self, resident: Resident) -> dict[SegmentKind, torch.Tensor]:
        [extent] = resident.extents
        found = {}
        for segment in resident.header.segments:
            first = (extent.start + segment.offset) // 4
            num_elements = segment.length_bytes // 4
            found[segment.kind] = self.arena.flat[first : first + num_elements].view(segment.shape)
        return found

    def finish(self) -> list[Divided]:
        done: list[Divided] = []
        for _ in range(100):
            done += self.magnitudes.advance()
        return done


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Ten rows at once, twenty between two steps."""
    monkeypatch.setattr(magnitudes, "CPU_SLICE_ELEMENTS", 10 * IN)
    monkeypatch.setattr(magnitudes, "CPU_ELEMENTS", 20 * IN)
    return World()


def test_magnitudes_become_what_outputs_are_multiplied_with(world: World) -> None:
    found = world.add("one")
    given = found[MAGNITUDE].clone()
    assert world.magnitudes.advance() == [], "a part at a time"
    assert world.finish() == [("one", None)]
    norms = (world.weight.values + found[B].t() @ found[A]).norm(dim=1)
    torch.testing.assert_close(found[MAGNITUDE], given / norms)


def test_a_row_that_becomes_zero_is_refused_alone(world: World) -> None:
    found = world.add("one")
    world.weight.values[7] = 0.0
    found[B][:, 7] = 0.0
    world.add("two")[B].fill_(1.0)
    (first, error), second = world.finish()
    assert (first, type(error)) == ("one", AdapterUnusable)
    assert "a row of lm_head becomes zero" in str(error)
    assert second == ("two", None)


def test_what_finds_no_memory_fails_alone(world: World) -> None:
    """An error of the device's allocator must not end the engine."""

    def fail() -> None:
        world.weight.fails = lambda: None
        raise torch.OutOfMemoryError("CUDA out of memory")

    world.weight.fails = fail
    for digest in ("one", "two"):
        world.add(digest)
    (first, error), second = world.finish()
    assert (first, type(error)) == ("one", OutOfDeviceMemory)
    assert second == ("two", None)


def test_an_error_in_dividing_ends_one_load(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        world.weight.fails = lambda: None
        raise ValueError("what nobody has thought of")

    world.weight.fails = fail
    for digest in ("one", "two"):
        world.add(digest)
    (first, error), second = world.finish()
    assert (first, type(error)) == ("one", Internal)
    assert "what nobody has thought of" in caplog.text
    assert second == ("two", None)


def test_adapters_take_turns(world: World) -> None:
    """So that one with many magnitudes does not hold up those behind it."""
    for digest in ("one", "two"):
        world.add(digest)
    steps = {}
    for step in range(100):
        steps |= {divided.digest: step for divided in world.magnitudes.advance()}
    assert abs(steps["one"] - steps["two"]) <= 1
