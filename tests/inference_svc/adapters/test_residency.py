"""Residency, from digest to table row: pulls that succeed, fail, are lost, cancelled, or wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.errors import AdapterNotFound, AdapterUnusable, CorruptImage
from tests.support.inference.loop import Loop, assert_computes
from tests.support.inference.memory_store import MemoryRegistrar


@pytest.fixture(params=["arena-only", "host-tier", "registered"])
def loop(request, store, layout: ModelLayout) -> Iterator[Loop]:
    """An arena for two images of rank 4 (7,680 bytes each). Registered images are mapped, and
    copied to the arena from there."""
    registrar, registrations = MemoryRegistrar(), None
    if request.param == "registered":
        registrations, store.maps = Registrations(registrar, min_bytes=0), True
    host_bytes = 0 if request.param == "arena-only" else 1 << 20
    made = Loop(store, layout, 16384, host_bytes, registrations=registrations)
    yield made
    made.residency.loader.cancel_all()
    made.until(lambda: not made.residency.is_copying and not made.residency.tiers.filling)
    made.puller.close()
    assert not registrar.registered
    assert not any(mapping.num_holders for mapping in store.mappings)


def needing_room(loop: Loop) -> list[str]:
    return [d for d, load in loop.residency.loads.by_digest.items() if load.needs_room]


def test_pull_becomes_a_row(loop: Loop, store) -> None:
    store.add("aaaa")
    slot = loop.load("aaaa")
    assert_computes(loop, store, "aaaa", slot)
    assert loop.residency.counters.misses == 1
    assert loop.load("aaaa") == slot
    assert loop.residency.counters.device_hits == 1
    assert store.pulls == [("aaaa", 0)]


def test_lost_stream_resumes_at_the_last_verified_part(loop: Loop, store) -> None:
    image = store.add("aaaa")
    store.lose_after = [1, 6]
    slot = loop.load("aaaa")
    assert_computes(loop, store, "aaaa", slot)
    # The parts of a mapped image are nowhere else.
    assert [offset for _, offset in store.pulls] == [0, 0, 0 if store.maps else image.ends[0]]


SEE_LOG = "; try again later (this server's log has the store's address)"


def test_wait_for_the_store_has_a_reason(
    loop: Loop, store, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has what callers are referred to, once for each pull."""
    image = store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", 0.0)
    assert loop.residency.loader.wait_reason("aaaa", 0.0) == (
        "other adapters are pulled first; try again later"
    )
    load = loop.residency.loads["aaaa"]
    loop.until(lambda: load.granted_s is not None)
    arrived = f"its pull is under way, 0 of {len(image.data):,} bytes have arrived; try again later"
    assert loop.residency.loader.wait_reason("aaaa", 0.0) == arrived
    store.lose_after = [0] * 1000
    store.gate.set()
    assert load.job is not None
    loop.until(lambda: len(store.pulls) > 2)
    now_s = load.job.failed_s + 7.2
    assert loop.residency.loader.wait_reason("aaaa", now_s) == f"stream lost, for 7 s now{SEE_LOG}"
    [failed] = [record for record in caplog.records if "stream lost" in record.message]
    assert (failed.message, failed.source) == ("pull: stream lost; trying again", "memory")
    store.lose_after = []
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    loop.residency.acquire("aaaa")


def test_store_that_never_answered_is_the_reason(store, layout: ModelLayout) -> None:
    loop = Loop(store, layout, 16384, 0, layout_id="")
    loop.residency.add_waiter("aaaa", 0.0)
    reason = f"the adapter store has not answered since this server started{SEE_LOG}"
    assert loop.residency.loader.wait_reason("aaaa", 1.0) == reason
    loop.residency.remove_waiter("aaaa")
    loop.puller.close()


def test_corrupt_pull_is_retried_once(loop: Loop, store) -> None:
    store.add("aaaa")
    store.corrupt = 1
    assert_computes(loop, store, "aaaa", loop.load("aaaa"))
    assert loop.residency.counters.pulls_corrupt == 1
    store.add("bbbb")
    store.corrupt = 2
    loop.residency.add_waiter("bbbb", 0.0)
    loop.until(lambda: loop.failures)
    (digest, error) = loop.failures[0]
    assert digest == "bbbb"
    assert isinstance(error, CorruptImage)
    assert loop.residency.counters.pulls_corrupt == 3
    loop.residency.remove_waiter("bbbb")
    assert "bbbb" not in loop.residency.device


def test_failing_loads_leak_nothing(loop: Loop, store) -> None:
    store.add("good")
    used = loop.residency.device.used_bytes
    for number in range(50):
        loop.residency.add_waiter(f"missing-{number}", 0.0)
    loop.until(lambda: len(loop.failures) == 50)
    assert all(isinstance(error, AdapterNotFound) for _, error in loop.failures)
    for digest, _ in loop.failures:
        loop.residency.remove_waiter(digest)
    assert loop.residency.device.used_bytes == used
    assert_computes(loop, store, "good", loop.load("good"))


def test_cancelled_load_leaks_nothing(loop: Loop, store, caplog: pytest.LogCaptureFixture) -> None:
    store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", 0.0)
    memory = loop.residency.device if loop.residency.host is None else loop.residency.host.slots
    loop.until(lambda: "aaaa" in memory)
    loop.residency.remove_waiter("aaaa")
    loop.until(lambda: loop.residency.loads.num_jobs == 0)
    assert memory.used_bytes == 0
    assert not caplog.records, "its stream was ended here: the store has not failed"
    store.gate.set()
    assert_computes(loop, store, "aaaa", loop.load("aaaa"))


def test_waiter_returns_during_cancellation(loop: Loop, store) -> None:
    store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", 0.0)
    loop.step()
    loop.residency.remove_waiter("aaaa")
    loop.residency.add_waiter("aaaa", 0.0)
    store.gate.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert_computes(loop, store, "aaaa", loop.residency.acquire("aaaa"))


def test_more_adapters_than_the_arena_holds(loop: Loop, store) -> None:
    for digest in ("aaaa", "bbbb", "cccc", "dddd"):
        store.add(digest)
    for _ in range(2):
        for digest in ("aaaa", "bbbb", "cccc", "dddd"):
            slot = loop.load(digest)
            assert_computes(loop, store, digest, slot)
            loop.residency.release(digest)
    assert loop.residency.device.num_evictions >= 6
    expected = 4 if loop.residency.host is not None else 8
    assert len(store.pulls) == expected


def test_load_waits_until_a_user_releases(loop: Loop, store) -> None:
    for digest in ("aaaa", "bbbb", "cccc"):
        store.add(digest)
    for digest in ("aaaa", "bbbb"):
        loop.load(digest)
    loop.residency.add_waiter("cccc", 0.0)
    loop.until(lambda: needing_room(loop) == ["cccc"])
    assert loop.residency.loads.store_wait_since_s("cccc") is None
    loop.residency.release("aaaa")
    loop.until(lambda: loop.residency.is_resident("cccc"))
    assert_computes(loop, store, "cccc", loop.residency.acquire("cccc"))
    assert loop.residency.device.get("bbbb") is not None


def test_due_sooner_is_not_evicted(loop: Loop, store) -> None:
    for digest in ("aaaa", "bbbb", "cccc"):
        store.add(digest)
    for digest in ("aaaa", "bbbb"):
        loop.load(digest)
        loop.residency.release(digest)
    loop.queue = ["aaaa", "cccc"]
    loop.load("cccc")
    assert loop.residency.is_resident("aaaa")
    assert not loop.residency.is_resident("bbbb")


def test_larger_than_the_arena_is_refused(loop: Loop, store) -> None:
    store.add("huge", rank=64)
    loop.residency.add_waiter("huge", 0.0)
    loop.until(lambda: loop.failures)
    error = loop.failures[0][1]
    assert isinstance(error, AdapterUnusable)
    assert error.message == (
        "adapter huge has an image of 122,880 bytes, more than --adapter-memory 16,384 holds: "
        "raise it"
    )
    loop.residency.remove_waiter("huge")
    loop.until(lambda: loop.residency.loads.num_jobs == 0)


def test_pins_refuse_what_they_leave_no_place_for(loop: Loop, store) -> None:
    """Images with whole weights are larger than what pins leave room for: one that waits for memory
    beside what is pinned meanwhile would wait for ever."""
    for digest, rank in (("aaaa", 4), ("huge", 8), ("cccc", 4)):
        store.add(digest, rank)
    loop.load("aaaa")
    for digest in ("huge", "cccc"):
        loop.residency.add_waiter(digest, 0.0)
        loop.queue.append(digest)
    loop.until(lambda: "huge" in needing_room(loop))
    loop.residency.device.pin("aaaa")
    loop.until(lambda: loop.failures)
    assert [digest for digest, _ in loop.failures] == ["huge"]
    assert "pinned adapters leave less of --adapter-memory: unpin" in str(loop.failures[0][1])
    loop.residency.remove_waiter("huge")
    loop.queue.remove("huge")
    loop.until(lambda: loop.residency.is_resident("cccc"))
    loop.residency.acquire("cccc")
    loop.until(lambda: loop.residency.loads.num_jobs == 0)
    loop.residency.device.unpin("aaaa")
    for digest in ("aaaa", "cccc"):
        loop.residency.release(digest)
    loop.load("huge")


def test_refusal_of_a_load_is_due_at_once(loop: Loop, store) -> None:
    """What is found between two steps: nothing else may happen for long."""
    store.add("aaaa")
    loop.load("aaaa")
    loop.residency.release("aaaa")
    resident = loop.residency.device.get("aaaa")
    assert resident is not None
    resident.ready = False
    loop.residency.tiers.dividing["aaaa"] = resident
    assert loop.residency.loader.next_expiry_s() is None
    with pytest.raises(AdapterUnusable, match="still loading"):
        loop.residency.unload("aaaa")
    loop.residency.loader.finish_dividing("aaaa", AdapterUnusable("a row becomes zero"))
    assert loop.residency.loader.next_expiry_s() == 0.0
    assert "aaaa" not in loop.residency.device
    [(digest, error)] = loop.residency.loader.pop_failures()
    assert (digest, isinstance(error, AdapterUnusable)) == ("aaaa", True)
    loop.load("aaaa")


def test_unload_drains_then_frees(loop: Loop, store) -> None:
    store.add("aaaa")
    loop.load("aaaa")
    assert loop.residency.unload("aaaa") > 0
    assert loop.residency.is_draining("aaaa")
    assert not loop.residency.is_resident("aaaa")
    loop.residency.release("aaaa")
    assert loop.residency.device.used_bytes == 0
    if loop.residency.host is not None:
        host = loop.residency.host.slots
        loop.until(lambda: not host.used_bytes)  # it is still being filled, perhaps
    with pytest.raises(AdapterNotFound):
        loop.residency.unload("aaaa")


def test_fragmented_image_computes_the_same(loop: Loop, store) -> None:
    """Holes of two targets and of one take an image of three targets in two extents."""
    for digest, rank in (("aaaa", 4), ("bbbb", 2), ("cccc", 6)):
        store.add(digest, rank)
    loop.load("aaaa")
    loop.load("bbbb")
    loop.residency.release("aaaa")
    slot = loop.load("cccc")
    resident = loop.residency.device.get("cccc")
    assert resident is not None
    assert len(resident.extents) == 2
    assert_computes(loop, store, "cccc", slot)


def test_loads_short_of_memory_block_no_others(loop: Loop, store) -> None:
    """No more pulls start than there are threads, except one that is due before them; and a load
    that needs no memory ends."""
    for digest in ("aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff", "gggg"):
        store.add(digest)
    for digest in ("aaaa", "bbbb"):
        loop.load(digest)
    waiting = ("cccc", "dddd", "eeee", "ffff", "gggg")
    for digest in waiting:
        loop.residency.add_waiter(digest, 0.0)
    loop.until(lambda: len(needing_room(loop)) >= 2)
    loop.residency.add_waiter("missing", 0.0)
    loop.queue = ["missing"]
    loop.until(lambda: loop.failures)
    loop.residency.remove_waiter("missing")
    if loop.residency.host is None:
        assert loop.residency.loads.num_jobs <= 4
    for digest in waiting:
        loop.residency.remove_waiter(digest)
    loop.until(lambda: loop.residency.loads.num_jobs == 0)


def test_pull_whose_waiters_expired_is_finished(loop: Loop, store) -> None:
    """The next request finds it; one that stalls is abandoned."""
    store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", 0.0)
    loop.until(lambda: loop.residency.loads["aaaa"].header is not None)
    loop.step()
    loop.residency.remove_waiter("aaaa", expired=True)
    loop.step()
    assert loop.residency.loads.num_jobs == 1
    store.gate.set()
    memory = loop.residency.device if loop.residency.host is None else loop.residency.host.slots
    loop.until(lambda: loop.residency.loads.num_jobs == 0)
    assert "aaaa" in memory

    store.add("bbbb")
    store.gate.clear()
    loop.residency.loader.stall_s = 0.1
    loop.residency.add_waiter("bbbb", 0.0)
    loop.until(lambda: loop.residency.loads["bbbb"].header is not None)
    loop.step()
    loop.residency.remove_waiter("bbbb", expired=True)
    loop.until(lambda: loop.residency.loads.num_jobs == 0)
    assert "bbbb" not in memory
