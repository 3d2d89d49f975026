"""An image on its way from the host tier is nobody's until it lies in the arena."""

from __future__ import annotations

import time

import pytest
import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.changes import HostCopy, TableWrite
from inference_svc.adapters.host_tier import HostTier
from inference_svc.adapters.slots import Slots

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device_name", ["cpu", GPU])
def test_a_copy_shows_when_it_has_completed(store, layout, device_name) -> None:
    device = torch.device(device_name)
    image = store.add("aaaa")
    host = HostTier(1 << 20, pin_memory=device.type == "cuda")
    arena = Arena(layout, 16384, 4, 64, device, host.slab)
    slots = Slots(16384, 4)
    hosted, resident = host.slots.reserve(image.header), slots.reserve(image.header)
    assert hosted is not None
    assert resident is not None
    start = hosted.extents[0].start
    host.memory[start : start + len(image.data)] = image.data
    arena.apply([HostCopy(hosted, resident)])
    assert not arena.table.ranks.any(), "not visible yet"
    copied: list[str] = []
    deadline = time.monotonic() + 10
    while not copied:
        assert time.monotonic() < deadline
        copied = arena.take_copied()
    assert copied == ["aaaa"]
    assert arena.take_copied() == []
    there = arena.flat.view(torch.uint8)[resident.extents[0].start :][: len(image.data)]
    assert bytes(there.cpu().numpy().data) == bytes(image.data)
    arena.apply([TableWrite(resident)])
    assert arena.table.ranks.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_waits_for_the_steps_before_it(store, layout) -> None:
    """What read the extent before is still at work when its bytes are given away."""
    image = store.add("aaaa")
    host = HostTier(1 << 20, pin_memory=True)
    arena = Arena(layout, 16384, 4, 64, torch.device("cuda"), host.slab)
    hosted, resident = host.slots.reserve(image.header), Slots(16384, 4).reserve(image.header)
    assert hosted is not None
    assert resident is not None
    host.slab.fill_(1)
    before = arena.flat.view(torch.uint8).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    seen = arena.flat.view(torch.uint8).clone()
    arena.apply([HostCopy(hosted, resident)])
    torch.cuda.synchronize()
    assert torch.equal(seen, before)
    assert arena.take_copied() == ["aaaa"]
