"""Slots: eviction, pins and accounting, against random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.eviction import EvictionReason, can_evict
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Shape
from inference_svc.errors import NoRoom
from servicekit.errors import ShareExceeded

KIB = 1024


def header(digest: str, kib: int) -> ImageHeader:
    """An image of `kib` targets of one KiB each."""
    segments = []
    for target in range(kib):
        for kind, offset in ((SegmentKind.A, 0), (SegmentKind.B, 512)):
            segments.append(Segment(target, kind, 4, target * KIB + offset, 512))
    return ImageHeader(digest, digest, "layout", 1, kib * KIB, tuple(segments))


class SlotsMachine(RuleBasedStateMachine):
    digests = st.sampled_from("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(16 * KIB, 4, [Shape.of(header("largest", 6))])
        self.users: dict[str, int] = {}
        self.superseded: set[str] = set()

    @rule(digest=digests, kib=st.integers(1, 6), keep=st.sets(digests, max_size=3))
    def reserve(self, digest: str, kib: int, keep: set[str]) -> None:
        if digest in self.slots:
            return
        before = {r.digest: r for r in self.slots.residents()}
        could_fit = self.slots.pins.admits(header(digest, kib))
        reservation = self.slots.reserve(header(digest, kib), keep)
        gone = set(before) - {r.digest for r in self.slots.residents()}
        old = {d for d in self.superseded & set(before) if can_evict(before[d], keep)}
        assert gone <= old or old <= gone, "a superseded image outlived another"
        for lost in gone:
            assert before[lost].ready
            assert not before[lost].pinned
            assert not self.users.get(lost)
            assert lost not in keep
        if reservation is None:
            assert not gone, "evicted in vain"
            return
        assert could_fit
        assert {r.digest for r in reservation.evicted} == gone
        assert reservation.resident.num_bytes == kib * KIB
        self.users[digest] = 0

    @rule(digest=digests)
    def make_ready(self, digest: str) -> None:
        if (resident := self.slots.get(digest)) is not None:
            resident.ready = True

    @rule(digest=digests)
    def acquire(self, digest: str) -> None:
        resident = self.slots.get(digest)
        if resident is not None and resident.ready:
            self.slots.acquire(digest, 0.0)
            self.users[digest] += 1

    @rule(digest=digests)
    def release(self, digest: str) -> None:
        if digest in self.slots and self.users[digest]:
            self.slots.release(digest)
            self.users[digest] -= 1

    @rule(digest=digests, is_superseded=st.booleans())
    def supersede(self, digest: str, is_superseded: bool) -> None:
        self.slots.set_superseded(digest, is_superseded)
        (self.superseded.add if is_superseded else self.superseded.discard)(digest)

    @rule(digest=digests)
    def pin(self, digest: str) -> None:
        resident = self.slots.get(digest)
        if resident is None:
            return
        try:
            self.slots.pin(digest)
        except NoRoom:
            assert not resident.pinned

    @rule(digest=digests)
    def unpin(self, digest: str) -> None:
        if digest in self.slots:
            self.slots.unpin(digest)

    @invariant()
    def is_whole(self) -> None:
        self.slots.check_integrity()

    @invariant()
    def pins_leave_room_for_the_largest(self) -> None:
        assert self.slots.pins.admits(header("largest", 6))


SlotsMachine.TestCase.settings = settings(max_examples=15, deadline=None)
TestSlots = SlotsMachine.TestCase


@pytest.mark.long
def test_many_more() -> None:
    run_state_machine_as_test(SlotsMachine, settings=settings(max_examples=400, deadline=None))


def ready(slots: Slots, digest: str, kib: int) -> None:
    reservation = slots.reserve(header(digest, kib))
    assert reservation is not None
    reservation.resident.ready = True


def test_evicts_the_least_recently_used() -> None:
    slots = Slots(4 * KIB, 8)
    for digest in "abcd":
        ready(slots, digest, 1)
    slots.acquire("a", 0.0)
    slots.release("a")
    ready(slots, "e", 2)
    assert [r.digest for r in slots.residents()] == ["d", "a", "e"]
    assert slots.num_evictions == 2


def test_evicts_superseded_first_once_they_are_idle() -> None:
    slots = Slots(4 * KIB, 8)
    for digest in "abcd":
        ready(slots, digest, 1)
    slots.acquire("c", 0.0)
    for digest in "cd":
        slots.set_superseded(digest, True)
    ready(slots, "e", 1)
    assert "d" not in slots
    ready(slots, "f", 1)
    assert "a" not in slots, "c is in use"
    slots.release("c")
    slots.set_superseded("g", True)
    ready(slots, "g", 1)
    assert "c" not in slots
    ready(slots, "h", 1)
    assert "g" not in slots, "it was superseded before it came"
    slots.set_superseded("b", True)
    slots.set_superseded("b", False)
    slots.acquire("b", 0.0)
    slots.release("b")
    ready(slots, "i", 1)
    assert "b" in slots, "used again, it is like any other"
    assert "e" not in slots


def test_evicts_nothing_in_vain() -> None:
    slots = Slots(4 * KIB, 8)
    ready(slots, "a", 2)
    ready(slots, "b", 2)
    slots.acquire("b", 0.0)
    assert slots.reserve(header("c", 3)) is None
    assert "a" in slots


def test_pins_that_would_block_others_are_refused() -> None:
    slots = Slots(8 * KIB, 8, [Shape.of(header("largest", 4))])
    for digest in "ab":
        ready(slots, digest, 3)
    slots.pin("a")
    with pytest.raises(NoRoom, match="raise --adapter-memory"):
        slots.pin("b")


def test_pins_are_shares() -> None:
    """Of rows and of bytes; of one account at most half of what others leave, but one."""
    slots = Slots(40 * KIB, 9, pin_share=0.5)
    for digest in "abcdefgh":
        ready(slots, digest, 1)
    for digest in "abcd":
        slots.pin(digest, "tenant x")
    with pytest.raises(ShareExceeded, match="tenant x has pinned 4 adapters") as caught:
        slots.pin("e", "tenant x")
    assert caught.value.subject == "pinned_adapters"
    slots.pin("a", "tenant x")  # it is pinned already
    for digest in "ef":
        slots.pin(digest, "tenant y")
    with pytest.raises(ShareExceeded):
        slots.pin("g", "tenant y")
    slots.pin("g", "tenant z")
    slots.pin("h")  # an operator of all tenants
    slots.unpin("h")
    slots.pin("h", "tenant w")
    slots.check_integrity()


def test_accounts_pin_equal_content_each_for_itself() -> None:
    """Nobody takes back another's pin, nor pays for it."""
    slots = Slots(40 * KIB, 9, pin_share=0.5)
    for digest in "abcdefgh":
        ready(slots, digest, 1)
    for account in ("tenant x", "tenant y"):
        assert slots.pin("a", account).pinned_by >= {account}
    assert slots.pinned_bytes == KIB, "of one image"
    assert slots.unpin("a", "tenant z").pinned, "who pins nothing takes nothing back"
    assert slots.unpin("a", "tenant y").pinned
    slots.check_integrity()
    for digest in "bcd":
        slots.pin(digest, "tenant x")
        slots.pin(digest, "tenant y")
    for account in ("tenant x", "tenant y"):
        with pytest.raises(ShareExceeded, match=account):
            slots.pin("e", account)
    assert slots.unpin("b", "tenant x").pinned_by == {"tenant y"}
    assert not slots.unpin("b", "tenant y").pinned
    slots.pin("c", "")
    assert slots.unpin("c", "tenant x").pinned_by == {"tenant y", ""}
    assert not slots.unpin("c").pinned, "operators of all tenants free an image"
    slots.check_integrity()
    assert slots.pinned_bytes == 2 * KIB


def test_bytes_of_pins_are_shares() -> None:
    slots = Slots(24 * KIB, 8, [Shape.of(header("largest", 4))], pin_share=0.5)
    for digest, kib in (("a", 4), ("b", 4), ("c", 4), ("d", 8)):
        ready(slots, digest, kib)
    for digest in "ab":
        slots.pin(digest, "tenant x")
    with pytest.raises(ShareExceeded, match="10240 bytes"):
        slots.pin("c", "tenant x")
    slots.pin("d", "tenant y")  # more than its share, as the only one that it has


def test_evicts_nothing_in_vain_when_memory_is_fragmented() -> None:
    """Eight KiB are free or idle, in holes of two between used images; six in one piece are not."""
    slots = Slots(16 * KIB, 16)
    for digest in "abcdefgh":
        ready(slots, digest, 2)
    for digest in "aceg":
        slots.acquire(digest, 0.0)
    whole = ImageHeader("w", "w", "layout", 1, 6 * KIB, (Segment(0, SegmentKind.A, 1, 0, 6 * KIB),))
    assert not slots.reserve(whole)
    assert len(slots) == 8


def test_evicts_unwaited_first() -> None:
    slots = Slots(4 * KIB, 8)
    for digest in "abcd":
        ready(slots, digest, 1)
    slots.reserve(header("e", 1), waited_for={"a", "b"})
    assert "c" not in slots
    assert "a" in slots


def test_usage_figures() -> None:
    slots = Slots(16 * KIB, 8)
    for digest, kib in (("a", 4), ("b", 4), ("c", 4)):
        ready(slots, digest, kib)
    slots.pin("a")
    slots.remove("b")
    assert (slots.pinned_bytes, slots.used_bytes) == (4 * KIB, 8 * KIB)
    assert (slots.extents.largest_free_bytes, slots.extents.num_free_ranges) == (4 * KIB, 2)
    assert slots.reserve(header("d", 10), reason=EvictionReason.AGED) is not None
    assert slots.evictions == {EvictionReason.AGED: 1}
    assert (slots.extents.largest_free_bytes, slots.extents.num_free_ranges) == (2 * KIB, 1)


def test_an_image_that_is_current_again_outlives_superseded_ones() -> None:
    slots = Slots(16 * KIB, 4, [Shape.of(header("largest", 6))])
    for digest, kib in (("old", 4), ("again", 4)):
        slots.set_superseded(digest, True)
        reservation = slots.reserve(header(digest, kib), ())
        assert reservation is not None
        reservation.resident.ready = True
    slots.set_superseded("again", False)
    reservation = slots.reserve(header("new", 10), ())
    assert reservation is not None
    assert [each.digest for each in reservation.evicted] == ["old"]
