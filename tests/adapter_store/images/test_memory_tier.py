from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.core import ImageKey
from adapter_store.images.tiers.disk_tier import Removal
from adapter_store.images.tiers.memory_tier import MemoryEntry, MemoryTier
from adapter_store.images.worker_pool import Priority


def key(name: str) -> ImageKey:
    return ImageKey(f"sha256:{name}", "sha256:layout")


def plan(num_bytes: int):
    """The tier asks a plan for nothing but its size."""
    return SimpleNamespace(total_bytes=num_bytes)


def on_loop(scenario):
    """A tier lives on a loop."""

    def test() -> None:
        async def main() -> None:
            scenario()

        asyncio.run(main())

    test.__name__ = scenario.__name__
    return test


def memory(capacity: int = 100, pinned: tuple[str, ...] = ()) -> MemoryTier:
    return MemoryTier(capacity, lambda k: k in {key(name) for name in pinned})


def begin(tier: MemoryTier, name: str, num_bytes: int) -> MemoryEntry:
    reservation = tier.reserve(num_bytes, Priority.PULL)
    return tier.start(key(name), plan(num_bytes), reservation)


def put(tier: MemoryTier, name: str, num_bytes: int) -> MemoryEntry:
    """Built, cached, and not held."""
    entry = begin(tier, name, num_bytes)
    tier.put(entry)
    tier.release(entry)
    return entry


@on_loop
def test_the_least_recently_used_goes_first():
    tier = memory()
    for name in "abc":
        put(tier, name, 30)
    assert tier.find(key("a")) is not None
    put(tier, "d", 30)
    assert [name for name in "abcd" if key(name) in tier] == ["a", "c", "d"]
    assert (tier.counts.used_bytes, tier.counts.images, tier.counts.evictions) == (90, 3, 1)
    assert tier.find(key("b")) is None
    assert (tier.counts.hits, tier.counts.misses) == (1, 1)


@on_loop
def test_pinned_images_never_leave():
    tier = memory(pinned=("a", "b"))
    for name in "abcd":
        put(tier, name, 40)
    assert [name for name in "abcd" if key(name) in tier] == ["a", "b"]
    assert tier.counts.used_bytes == 80
    put(tier, "e", 10)
    assert [name for name in "abcde" if key(name) in tier] == ["a", "b", "e"]


@on_loop
def test_bytes_are_accounted_from_the_buffer_to_its_end():
    tier = memory()
    a = begin(tier, "a", 80)
    assert (tier.counts.used_bytes, tier.counts.images) == (80, 1)
    assert key("a") not in tier
    tier.release(a)  # it failed
    assert (tier.counts.used_bytes, tier.counts.images, a.is_freed) == (0, 0, True)
    tier.check_integrity()


@on_loop
def test_dropped_image_is_accounted_until_released():
    tier = memory()
    a = put(tier, "a", 80)
    with tier.hold(a), tier.hold(a):
        tier.drop_digests({"sha256:a"})
        assert key("a") not in tier
        assert (tier.counts.used_bytes, a.is_freed) == (80, False)
    assert (tier.counts.used_bytes, a.is_freed) == (0, True)
    tier.check_integrity()


@on_loop
def test_image_larger_than_the_tier_stays_while_held():
    tier = memory()
    big = begin(tier, "big", 500)
    tier.put(big)
    assert tier.counts.used_bytes == 500
    tier.release(big)
    assert (tier.counts.used_bytes, tier.counts.images) == (0, 0)


@on_loop
def test_spare_serves_the_next_image_of_its_size():
    tier = memory()
    a = put(tier, "a", 30)
    assert tier.lacks_spare(30)
    spare = tier.pool.make(30)
    tier.add_spare(spare)
    assert not tier.lacks_spare(30)
    assert tier.lacks_spare(40)
    assert not tier.lacks_spare(41)
    assert tier.counts.used_bytes == 30  # not held, so it is evicted when its bytes are needed
    b = begin(tier, "b", 30)
    assert b.image.memory is spare
    tier.release(b)
    put(tier, "c", 60)
    tier.drop(a.key)
    tier.check_integrity()


@on_loop
def test_spare_without_space_is_freed():
    tier = memory()
    put(tier, "a", 80)
    tier.add_spare(tier.pool.make(30))
    assert tier.lacks_spare(20)
    assert not tier.lacks_spare(30)


@on_loop
def test_reservations_wait_for_readers():
    tier = memory()  # with a margin of 12
    a = put(tier, "a", 60)
    with tier.hold(a):
        assert tier.reserve(52, Priority.PULL).granted.done()
        waiting = tier.reserve(30, Priority.PULL)
        assert not waiting.granted.done()
        assert tier.counts.used_bytes == 112
    assert waiting.granted.done()
    assert tier.counts.used_bytes == 82
    assert key("a") not in tier


@on_loop
def test_pulls_reserve_before_precompilation():
    tier = memory()
    a = begin(tier, "a", 100)
    ahead, joined = (tier.reserve(100, Priority.PRECOMPILE) for _ in range(2))
    first, second = (tier.reserve(100, Priority.PULL) for _ in range(2))
    tier.promote(joined)
    tier.promote(joined)
    order = []
    tier.release(a)
    for _ in range(4):
        (granted,) = (
            r for r in (ahead, joined, first, second) if r.granted.done() and r not in order
        )
        order.append(granted)
        tier.cancel_reservation(granted)
    assert order == [first, second, joined, ahead]
    tier.check_integrity()


@on_loop
def test_cancelled_reservation_is_granted_to_the_next():
    tier = memory()
    a = begin(tier, "a", 100)
    first, second = (tier.reserve(50, Priority.PULL) for _ in range(2))
    tier.cancel_reservation(first)
    tier.release(a)
    assert first.granted.cancelled()
    assert second.granted.done()
    tier.cancel_reservation(second)
    tier.check_integrity()


@on_loop
def test_one_image_always_can_be_made_even_when_all_is_pinned():
    tier = memory(pinned=("a",))
    put(tier, "a", 100)
    b = begin(tier, "b", 100)
    assert tier.counts.used_bytes == 200
    third = tier.reserve(1, Priority.PULL)
    assert not third.granted.done()
    tier.release(b)
    assert third.granted.done()


@on_loop
def test_spare_buffer_is_reused_and_accounted():
    tier = memory(800)
    a = put(tier, "a", 50)
    buffer = a.image.memory
    tier.drop(key("a"))
    assert (tier.counts.used_bytes, tier.pool.spare_bytes) == (0, 50)
    b = begin(tier, "b", 50)
    assert b.image.memory is buffer
    assert (tier.counts.used_bytes, tier.pool.spare_bytes) == (50, 0)
    tier.release(b)
    begin(tier, "c", 780)
    assert tier.counts.used_bytes + tier.pool.spare_bytes <= 800


def test_an_image_that_is_gone_cannot_be_held():
    def scenario() -> None:
        tier = memory()
        a = put(tier, "a", 10)
        tier.drop(key("a"))
        with pytest.raises(AssertionError), tier.hold(a):
            pass

    on_loop(scenario)()


STEPS = ["ask", "start", "finish", "fail", "hold", "release", "drop", "find", "return", "promote"]


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.sampled_from("abcdef"), st.integers(1, 60)),
        max_size=80,
    )
)
def test_accounts_are_exact_whatever_happens(steps):
    """Rooms, images being made, readers: used bytes are always the sum of what is alive, and what
    cannot leave stays within capacity and margin, or is one single image."""

    async def main() -> None:
        tier = memory(pinned=("f",))
        reservations, making, held, alive = [], [], [], set()
        for step, name, size in steps:
            granted = [reservation for reservation in reservations if reservation.granted.done()]
            if step == "ask":
                reservations.append(tier.reserve(size, Priority(size % 4)))
            elif step == "promote" and reservations:
                tier.promote(reservations[size % len(reservations)])
            elif step == "return" and reservations:
                tier.cancel_reservation(reservations.pop(size % len(reservations)))
            elif step == "start" and granted:
                reservations.remove(granted[0])
                entry = tier.start(key(name), plan(granted[0].num_bytes), granted[0])
                making.append(entry)
                alive.add(entry)
            elif step in ("finish", "fail") and making:
                entry = making.pop(0)
                if step == "finish":
                    tier.put(entry)
                tier.release(entry)
            elif step == "hold" and (entry := tier.find(key(name))) is not None:
                hold = tier.hold(entry)
                hold.__enter__()
                held.append(hold)
            elif step == "release" and held:
                held.pop(0).__exit__(None, None, None)
            elif step == "drop":
                tier.drop_digests({key(name)[0]})
            alive = {entry for entry in alive if not entry.is_freed}
            taken = sum(
                reservation.num_bytes for reservation in reservations if reservation.granted.done()
            )
            assert tier.counts.used_bytes == taken + sum(entry.num_bytes for entry in alive)
            assert tier.counts.images == len(alive)
            pinned = max((e.num_bytes for e in alive if e.key == key("f")), default=0)
            assert tier.counts.used_bytes <= 100 + 12 + pinned + 60
            assert tier.counts.used_bytes + tier.pool.spare_bytes <= max(
                100, tier.counts.used_bytes
            )
        for reservation in reservations:
            tier.cancel_reservation(reservation)
        for hold in held:
            hold.__exit__(None, None, None)
        for entry in making:
            tier.release(entry)
        tier.shrink()
        tier.check_integrity()

    asyncio.run(main())


@on_loop
def test_collected_digests_leave_in_one_pass():
    tier = memory(1000)
    for name in "abc":
        put(tier, name, 10)
    tier.drop_digests({f"sha256:{name}" for name in "acx"})
    assert [name for name in "abc" if key(name) in tier] == ["b"]
    assert tier.counts.used_bytes == 10
    tier.drop_layouts({"sha256:layout"})
    assert (tier.counts.removals[Removal.DELETED], tier.counts.removals[Removal.UNUSED]) == (2, 1)
    assert tier.counts.evictions == 0, "none of them evictions"
    tier.check_integrity()
