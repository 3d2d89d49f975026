"""Copies from the host tier into the arena, and the table's rows."""

from __future__ import annotations

import pytest
import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.slots import Slots
from inference_svc.adapters.tiers import HostCopy, HostTier, TableWrite
from tests.inference_svc.adapters.conftest import reserve
from tests.support.wait import until

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device_name", ["cpu", GPU])
def test_copy_is_visible_once_complete(store, layout, device_name) -> None:
    device = torch.device(device_name)
    image = store.add("aaaa")
    host = HostTier(1 << 20, pin_memory=device.type == "cuda")
    arena = Arena(layout, 16384, 4, 64, device, host.slab)
    slots = Slots(16384, 4)
    hosted, resident = reserve(host.slots, image.header), reserve(slots, image.header)
    start = hosted.extents[0].start
    host.memory[start : start + len(image.data)] = image.data
    arena.apply([HostCopy(hosted, resident)])
    assert not arena.table.ranks.any(), "not visible yet"
    assert until(arena.pop_completed_copies) == ["aaaa"]
    assert arena.pop_completed_copies() == []
    there = arena.flat.view(torch.uint8)[resident.extents[0].start :][: len(image.data)]
    assert bytes(there.cpu().numpy().data) == bytes(image.data)
    arena.apply([TableWrite(resident)])
    assert arena.table.ranks.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copy_waits_for_earlier_steps(store, layout) -> None:
    """A step may still read an extent whose bytes have been reserved for another image."""
    image = store.add("aaaa")
    host = HostTier(1 << 20, pin_memory=True)
    arena = Arena(layout, 16384, 4, 64, torch.device("cuda"), host.slab)
    hosted, resident = reserve(host.slots, image.header), reserve(Slots(16384, 4), image.header)
    host.slab.fill_(1)
    before = arena.flat.view(torch.uint8).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    seen = arena.flat.view(torch.uint8).clone()
    arena.apply([HostCopy(hosted, resident)])
    torch.cuda.synchronize()
    assert torch.equal(seen, before)
    assert arena.pop_completed_copies() == ["aaaa"]
