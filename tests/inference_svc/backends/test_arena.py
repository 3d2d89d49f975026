"""Copies from the host tier into the arena, and the table's rows; `tests/gpu` has a device's."""

from __future__ import annotations

import pytest
import torch

from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostCopy, HostTier, TableWrite
from inference_svc.backends import arena as arena_module
from inference_svc.backends.arena import Arena
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
