"""Copies from the host tier into the arena, and the table's rows; `tests/gpu` has a device's."""

from __future__ import annotations

from random import Random

import pytest
import torch

from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostCopy, HostTier, TableWrite
from inference_svc.backends import arena as arena_module
from inference_svc.backends.arena import Arena
from tests.support.gpu.late_streams import LateDevice
from tests.support.inference.memory_store import make_image, reserve, small_layout
from tests.support.wait import until


@pytest.mark.parametrize("copy_bytes", [4 << 20, 100])
def test_copy_is_visible_once_complete(monkeypatch, copy_bytes) -> None:
    monkeypatch.setattr(arena_module, "COPY_BYTES", copy_bytes)
    device = torch.device("cpu")
    image = make_image("aaaa", 4)
    host = HostTier(1 << 20)
    arena = Arena(small_layout(), 16384, 4, 64, device, 1 << 20)
    slots = Slots(16384, 4)
    hosted, resident = reserve(host.slots, image.header), reserve(slots, image.header)
    start = hosted.extents[0].start
    arena.pull_memory[start : start + len(image.data)] = image.data
    arena.apply([HostCopy(hosted, resident)])
    assert not arena.table.b_ranks.any(), "not visible yet"
    assert until(arena.pop_completed_copies) == ["aaaa"]
    assert arena.pop_completed_copies() == []
    there = arena.flat.view(torch.uint8)[resident.extents[0].start :][: len(image.data)]
    assert bytes(there.cpu().numpy().data) == bytes(image.data)
    arena.apply([TableWrite(resident)])
    assert arena.table.b_ranks.any()


def test_images_of_ranks_land_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, at the extents that they were pulled to, and not before the steps that may read
    there; whoever has them land finds them there."""
    monkeypatch.setattr(arena_module, "COPY_BYTES", 512)
    late = LateDevice(Random(0))
    arena = Arena(
        *(small_layout(), 16384, 4, 64, torch.device("cpu")),
        streams=late.streams,
        has_landing=True,
    )
    image, slots = make_image("aaaa", 4), Slots(16384, 4)
    [extent] = reserve(slots, image.header).extents
    there = arena.flat.view(torch.uint8)[extent.start :][: len(image.data)]
    arena.pull_memory[extent.start : extent.start + len(image.data)] = image.data
    seen: list[bool] = []
    late.compute.launch(lambda: seen.append(bool(there.any())))
    assert not there.any()
    arena.land([extent])
    assert bytes(there.numpy().data) == bytes(image.data)
    assert seen == [False]


def test_without_a_landing_images_are_pulled_to_the_arena() -> None:
    arena = Arena(small_layout(), 16384, 4, 64, torch.device("cpu"))
    arena.land([Extent(0, 0, 256)])
    assert arena.landing is None
    assert len(arena.pull_memory) == 16384
