"""Changes to the arena: evictions, and copies that are bounded by the step."""

from __future__ import annotations

import time

import pytest

from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import (
    HostCopy,
    HostTier,
    MemoryTiers,
    PendingChanges,
    TableClear,
    TableWrite,
)
from inference_svc.errors import AdapterUnusable
from tests.support.inference.loop import Loop, assert_computes
from tests.support.inference.memory_store import make_image, reserve


@pytest.mark.parametrize("has_host", [False, True], ids=["arena-only", "host-tier"])
def test_evictions_are_returned_and_change_the_arena(has_host: bool) -> None:
    first, second = make_image("aaaa", 4).header, make_image("bbbb", 4).header
    host = HostTier(first.total_bytes) if has_host else None
    device = Slots(first.total_bytes, 4)
    tiers = MemoryTiers(device, host, LoadTimes())
    for slots in {id(each): each for each in (device, tiers.pull_tier)}.values():
        reserve(slots, first).ready = True
    for make_room in (tiers.reserve_on_device, tiers.reserve_for_pull):
        if second.digest in tiers.pull_tier:
            break
        reservation = make_room(second, (), (), EvictionReason.REQUEST)
        assert reservation is not None
        assert [resident.digest for resident in reservation.evicted] == ["aaaa"]
        assert device.evictions == {EvictionReason.REQUEST: 1}
    assert tiers.changes.pop() == (TableClear(0),), "a host image has no row"
    assert tiers.pop_moved() == ["aaaa"]
    resident = device.get("bbbb")
    assert resident is not None
    tiers.publish(resident, 1.0)
    assert [type(change) for change in tiers.changes.pop()] == [TableWrite]
    assert tiers.pop_moved() == ["bbbb"]


def test_burst_is_copied_over_several_steps(store, layout) -> None:
    """No step waits for more than a part of it, and each adapter may start before the rest."""
    loop = Loop(store, layout, 16384, 1 << 20)
    residency, host = loop.residency, loop.residency.host
    assert host is not None
    for digest in ("cold", "aaaa", "bbbb", "cccc"):
        store.add(digest)
        loop.load(digest)
        residency.release(digest)
    assert len(host.slots) == 4
    assert len(residency.device) == 2
    num_bytes = host.slots.residents()[0].num_bytes
    residency.tiers.changes.max_copied_bytes = num_bytes * 3 // 2
    for digest in ("cold", "aaaa"):
        residency.add_waiter(digest, 0.0)
    residency.loader.advance(0.0, [("cold", False), ("aaaa", False)])
    for copied, waiting in (("cold", "aaaa"), ("aaaa", "")):
        changes = residency.pop_changes()
        copies = [change for change in changes if isinstance(change, HostCopy)]
        assert [copy.resident.digest for copy in copies] == [copied]
        loop.arena.apply(changes)
        residency.check_integrity(residency.waiters)
        residency.loader.finish_copies(loop.arena.pop_completed_copies(), time.monotonic())
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


def test_pending_changes_bound_copied_bytes(store, layout) -> None:
    image = store.add("aaaa")
    resident = reserve(Slots(16384, 4), image.header)
    pending, bounded = PendingChanges(), PendingChanges(1)
    copies = [HostCopy(resident, resident)] * 3
    for change in (*copies, TableClear(0)):
        pending.append(change)
        bounded.append(change)
    assert pending.pop() == (*copies, TableClear(0))
    assert bounded.pop() == (copies[0], TableClear(0)), "one at least, or none would ever come"
    assert bounded.pop() == (copies[1],)
    assert bounded.pop() == (copies[2],)
    assert bounded.pop() == ()
