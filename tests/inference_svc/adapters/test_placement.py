"""Drains: the adapters in use that are chosen for one that waited too long, and for how long."""

from __future__ import annotations

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.placement import Drains

KIB = 1024


def header(digest: str, kib: int) -> ImageHeader:
    """An image that can be cut at each KiB."""
    segments = tuple(Segment(target, SegmentKind.A, 4, target * KIB, KIB) for target in range(kib))
    return ImageHeader(digest, digest, "layout", 1, kib * KIB, segments)


def in_use(**users: int) -> Slots:
    """Returns ten KiB with images of three, each with that many users."""
    slots = Slots(10 * KIB, 4)
    for digest, count in users.items():
        reservation = slots.reserve(header(digest, 3))
        assert reservation is not None
        reservation.resident.ready = True
        for _ in range(count):
            slots.acquire(digest, 0.0)
    return slots


def picked(drains: Drains) -> set[str]:
    return {digest for digest in ("a", "b", "c") if digest in drains}


def test_drains_few_images_with_few_users() -> None:
    drains = Drains(in_use(a=3, b=1, c=2))
    drains.start("small", header("small", 3), keep=())
    assert picked(drains) == {"b"}
    drains.start("large", header("large", 5), keep=())
    assert picked(drains) == {"a", "b", "c"}, "not those that drain already"


def test_drains_neither_kept_nor_pinned() -> None:
    slots = in_use(a=3, b=1, c=2)
    slots.pin("c")
    drains = Drains(slots)
    drains.start("x", header("x", 3), keep={"b"})
    assert picked(drains) == {"a"}
    drains = Drains(slots)
    drains.start("x", header("x", 3), keep={"a", "b"})
    assert picked(drains) == set()


def test_choice_holds_until_drained() -> None:
    """Changing numbers of users do not change the choice: else none would ever be idle."""
    slots = in_use(a=2, b=1)
    drains = Drains(slots)
    drains.start("x", header("x", 5), keep=())
    assert picked(drains) == {"b"}
    slots.release("a")
    slots.release("a")
    assert drains.start("x", header("x", 5), keep=()) == []
    assert picked(drains) == {"b"}
    slots.release("b")
    slots.acquire("a", 0.0)
    slots.pin("b")
    assert drains.start("x", header("x", 5), keep=()) == ["b"], "it can no longer be evicted"
    assert picked(drains) == {"a"}


def test_ended_drains_are_released() -> None:
    drains = Drains(in_use(a=1, b=1, c=1))
    drains.start("x", header("x", 3), keep=())
    assert drains.end(lambda digest: False) == []
    assert drains.end(lambda digest: digest == "x") == ["a"]
    assert picked(drains) == set()
