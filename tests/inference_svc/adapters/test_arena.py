"""An image on its way from the host tier is nobody's until it lies in the arena."""

from __future__ import annotations

import time

import pytest
import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.image_source import ImageHeader
from inference_svc.adapters.slots import Resident, Slots
from inference_svc.adapters.tiers import (
    HostCopy,
    HostTier,
    PendingChanges,
    TableClear,
    TableWrite,
)
from inference_svc.errors import AdapterUnusable
from tests.inference_svc.adapters.test_residency import Loop, assert_computes

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def reserve(slots: Slots, header: ImageHeader) -> Resident:
    reservation = slots.reserve(header)
    assert reservation is not None
    return reservation.resident


@pytest.mark.parametrize("device_name", ["cpu", GPU])
def test_a_copy_shows_when_it_has_completed(store, layout, device_name) -> None:
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
    copied: list[str] = []
    deadline = time.monotonic() + 10
    while not copied:
        assert time.monotonic() < deadline
        copied = arena.pop_completed_copies()
    assert copied == ["aaaa"]
    assert arena.pop_completed_copies() == []
    there = arena.flat.view(torch.uint8)[resident.extents[0].start :][: len(image.data)]
    assert bytes(there.cpu().numpy().data) == bytes(image.data)
    arena.apply([TableWrite(resident)])
    assert arena.table.ranks.any()


def test_a_burst_is_copied_in_several_steps(store, layout) -> None:
    """So that none waits for more than a part of it, and each adapter may start before the rest."""
    loop = Loop(store, layout, 16384, 1 << 20)
    residency, host = loop.residency, loop.residency.host
    assert host is not None
    for digest in ("cold", "aaaa", "bbbb", "cccc"):
        store.add(digest)
        loop.load(digest)
        residency.release(digest)
    assert len(host.slots) == 4
    assert len(residency.device) == 2
    host.step_copy_bytes = host.slots.residents()[0].num_bytes * 3 // 2
    for digest in ("cold", "aaaa"):
        residency.add_waiter(digest, 0.0)
    residency.advance(0.0, [("cold", False), ("aaaa", False)])
    for copied, waiting in (("cold", "aaaa"), ("aaaa", "")):
        changes = residency.pop_changes()
        copies = [change for change in changes if isinstance(change, HostCopy)]
        assert [copy.resident.digest for copy in copies] == [copied]
        loop.arena.apply(changes)
        residency.check_integrity(residency.waiters)
        residency.finish_copies(loop.arena.pop_completed_copies(), time.monotonic())
        assert residency.is_resident(copied)
        if waiting:
            assert residency.is_copying, "there is more to be done"
            assert not residency.is_resident(waiting)
            with pytest.raises(AdapterUnusable, match="still loading"):
                residency.unload(waiting)
    loop.arena.apply(residency.pop_changes())
    for digest in ("cold", "aaaa"):
        assert_computes(loop, store, digest, residency.acquire(digest))
    assert not residency.is_copying
    loop.puller.close()


def test_what_runs_beside_the_steps_is_not_held_back(store, layout) -> None:
    image = store.add("aaaa")
    resident = reserve(Slots(16384, 4), image.header)
    pending = PendingChanges()
    copies = [HostCopy(resident, resident)] * 3
    for change in (*copies, TableClear(0)):
        pending.append(change)
    assert pending.pop(None) == (*copies, TableClear(0))
    for change in (*copies, TableClear(0)):
        pending.append(change)
    assert pending.pop(1) == (copies[0], TableClear(0)), "one at least, or none would ever come"
    assert pending.pop(1) == (copies[1],)
    assert pending.pop(1) == (copies[2],)
    assert pending.pop(1) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_waits_for_the_steps_before_it(store, layout) -> None:
    """What read the extent before is still at work when its bytes are given away."""
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
