"""The extent allocator against a model that knows every byte."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from contract.images.header import GRANULE_BYTES
from inference_svc.adapters.memory.extents import Extent, ExtentAllocator

GRANULES = 64


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(GRANULES * GRANULE_BYTES + 17)
        self.held: list[tuple[Extent, ...]] = []

    @rule(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6))
    def allocate(self, sizes: list[int]) -> None:
        cuts = [sum(sizes[:i]) * GRANULE_BYTES for i in range(len(sizes))]
        size = sum(sizes) * GRANULE_BYTES
        holes, free = self.holes(), self.allocator.free_bytes
        largest = max(holes, default=0)
        extents = self.allocator.allocate(size - 3, cuts)
        if extents is None:
            assert largest < size
            # The largest piece between two cuts fits nowhere, or the holes are too few for all.
            pieces = [part * GRANULE_BYTES for part in sizes]
            assert not self.fits_one_by_one(pieces, holes)
            return
        assert (len(extents) == 1) == (largest >= size)
        assert self.allocator.free_bytes == free - size
        position = 0
        for extent in extents:
            assert extent.image_offset == position
            assert extent.image_offset in cuts
            position += extent.num_bytes
        assert position == size
        self.held.append(extents)

    def holes(self) -> list[int]:
        used = sorted((e.start, e.end) for extents in self.held for e in extents)
        starts = [0, *(end for _, end in used)]
        ends = [*(start for start, _ in used), self.allocator.capacity]
        return [end - start for start, end in zip(starts, ends, strict=True) if end > start]

    @staticmethod
    def fits_one_by_one(pieces: list[int], holes: list[int]) -> bool:
        """Whether the pieces, in order, fill the holes, largest first, as far as each goes."""
        left = list(pieces)
        for hole in sorted(holes, reverse=True):
            while left and left[0] <= hole:
                hole -= left.pop(0)
        return not left

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def is_whole(self) -> None:
        self.allocator.check_integrity([extent for extents in self.held for extent in extents])

    @invariant()
    def with_used_is_equal(self) -> None:
        held = [extent for extents in self.held for extent in extents]
        made = ExtentAllocator.with_used(GRANULES * GRANULE_BYTES + 17, reversed(held))
        made.check_integrity(held)
        assert made.free_bytes == self.allocator.free_bytes
        assert made.num_free_ranges == self.allocator.num_free_ranges
        assert made.largest_free_bytes == self.allocator.largest_free_bytes


AllocatorMachine.TestCase.settings = settings(max_examples=15, deadline=None)
TestAllocator = AllocatorMachine.TestCase


@pytest.mark.long
def test_many_more() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=400, deadline=None))


def test_cuts_only_where_allowed() -> None:
    """Two holes of two granules hold four only if there is a cut in the middle."""
    allocator = ExtentAllocator(6 * GRANULE_BYTES)
    parts = [allocator.allocate(size * GRANULE_BYTES, [0]) for size in (2, 1, 2, 1)]
    for index in (0, 2):
        assert parts[index] is not None
        allocator.free(parts[index])
    assert allocator.allocate(4 * GRANULE_BYTES, [0, GRANULE_BYTES]) is None
    found = allocator.allocate(4 * GRANULE_BYTES, [0, 2 * GRANULE_BYTES])
    assert found is not None
    assert len(found) == 2
