"""Images whose parts lie in the arenas of several stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.image_slots import Slots, inadmissible_reason
from inference_svc.adapters.memory.pins import Pins
from inference_svc.adapters.memory.resident import Shape
from inference_svc.adapters.memory.stages import (
    StageMemories,
    extents_of,
    joined,
    parts_of,
    shape_of,
)
from tests.support.inference.memory_store import make_image

KIB = 1 << 10
ARENA_BYTES = 16 * KIB + 17
"""No multiple of the granules that are allocated."""


def header(digest: str, *ranks: int) -> ImageHeader:
    """Returns the header of an image whose parts have these ranks; 0: a part is empty."""
    return joined([make_image(digest, rank, (0, 1, 2) if rank else ()).header for rank in ranks])


@given(data=st.data())
def test_each_part_lies_in_its_own_arena(data: st.DataObject) -> None:
    """Images are admitted whole or not at all, by the fullest stage, and free what they took."""
    count = data.draw(st.integers(1, 3))
    slots = Slots(ARENA_BYTES, 6, num_stages=count)
    ranks = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    for number in range(data.draw(st.integers(1, 12))):
        image = header(f"sha256:{number}", *data.draw(ranks))
        reservation = slots.reserve(image)
        slots.check_integrity()
        assert reservation is not None, "others are evicted for it"
        reservation.resident.ready = True
        extents = reservation.resident.extents
        for stage, part in enumerate(parts_of(image)):
            own = extents_of(image, extents, stage, ARENA_BYTES)
            assert sum(each.num_bytes for each in own) == part.total_bytes
            offsets = sorted(each.image_offset for each in own)
            assert offsets[:1] == [0] * bool(own)
            assert all(0 <= each.start < each.end <= ARENA_BYTES for each in own)
        if data.draw(st.booleans()):
            slots.remove(image.digest)
            slots.check_integrity()


def test_a_stage_that_is_full_refuses_the_image() -> None:
    """Nothing of it is left in the others."""
    memories = StageMemories(8 * KIB, 2)
    assert memories.allocate([Shape(KIB), Shape(7 * KIB)]) is not None
    before = memories.free_ranges
    assert memories.allocate([Shape(KIB), Shape(2 * KIB)]) is None
    assert memories.free_ranges == before == [(KIB, 7 * KIB), (15 * KIB, KIB)]
    assert memories.allocate([Shape(7 * KIB), Shape(0)]) == (Extent(0, KIB, 7 * KIB),)
    assert (memories.least_free_bytes, memories.first_used_bytes) == (0, 8 * KIB)


def test_an_image_that_no_stage_may_exceed() -> None:
    """The part of the second stage is too large, although both together would fit."""
    large = header("sha256:a", 1, 8)
    slots = Slots(12 * KIB, 4, num_stages=2)
    reason = inadmissible_reason(large, 64, slots, None)
    size = parts_of(large)[1].total_bytes
    assert large.total_bytes < slots.capacity
    assert reason is not None
    assert f"an image of {size:,} bytes in a stage, more than --adapter-memory 12,288" in reason


def test_pins_leave_room_in_each_stage() -> None:
    image = header("sha256:a", 1, 2)
    largest = shape_of(header("sha256:b", 3, 1))
    pins = Pins(9 * KIB, 4, largest, 1.0, num_stages=2)
    assert pins.largest_bytes == sum(part.num_bytes for part in largest)
    assert pins.admits(image)
    assert not pins.admits(header("sha256:c", 1, 9))


def test_a_joined_header_has_the_segments_of_all() -> None:
    parts = [make_image("sha256:a", rank).header for rank in (2, 3)]
    whole = joined(parts)
    first_bytes = parts[0].total_bytes
    assert whole.total_bytes == first_bytes + parts[1].total_bytes
    assert whole.rank == 3
    moved = [each._replace(offset=each.offset + first_bytes) for each in parts[1].segments]
    assert list(whole.segments) == [*parts[0].segments, *moved]
    assert joined(parts[:1]) is parts[0]
