"""Which images are evicted or drained, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory import eviction
from inference_svc.adapters.memory.eviction import can_evict, drain_order, eviction_order
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident

KIB = 1024


def header(digest: str, kib: int = 1) -> ImageHeader:
    """An image of `kib` targets of one KiB each."""
    segments = (Segment(target, SegmentKind.A, 4, target * KIB, KIB) for target in range(kib))
    return ImageHeader(digest, digest, "layout", 1, kib * KIB, tuple(segments))


def resident(digest: str, *, ready: bool = True, users: int = 0, pinned: bool = False) -> Resident:
    return Resident(
        header(digest), 0, (), 4, ready=ready, users=users, pinned_by={""} if pinned else set()
    )


def digests(residents: Iterable[Resident]) -> list[str]:
    return [each.digest for each in residents]


def test_what_is_in_use_is_not_evicted() -> None:
    assert can_evict(resident("a"), keep=())
    assert not can_evict(resident("a", users=1), keep=())
    assert not can_evict(resident("a", pinned=True), keep=())
    assert not can_evict(resident("a", ready=False), keep=())
    assert not can_evict(resident("a"), keep={"a"})


def test_what_requests_wait_for_is_evicted_last() -> None:
    images = [resident("old"), resident("used", users=1), resident("waited"), resident("new")]
    assert digests(eviction_order(images, (), {"waited"})) == ["old", "new", "waited"]
    assert digests(eviction_order(images, {"old"}, {"waited"})) == ["new", "waited"]


def test_few_users_drain_first() -> None:
    images = [
        resident("busy", users=3),
        resident("pinned", users=1, pinned=True),
        resident("loading", ready=False),
        resident("quiet", users=1),
    ]
    assert digests(drain_order(images, ())) == ["quiet", "busy"]
    assert digests(drain_order(images, {"quiet"})) == ["busy"]


def test_eviction_examines_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = []

    def count(each: Resident, keep: Collection[str]) -> bool:
        examined.append(each.digest)
        return can_evict(each, keep)

    num_images = 2_000
    slots = Slots(num_images * 2 * KIB, num_images)
    for number in range(num_images):
        reservation = slots.reserve(header(f"d{number}", 2))
        assert reservation is not None
        reservation.resident.ready = True
    monkeypatch.setattr(eviction, "can_evict", count)
    assert slots.reserve(header("large", 5), waited_for={"d1"}) is not None
    assert [d for d in ("d0", "d1", "d2", "d3", "d4") if d not in slots] == ["d0", "d2", "d3"]
    assert examined == ["d0", "d2", "d3"]
