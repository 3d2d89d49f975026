"""Allocates extents of a flat memory: first fit, cut at target starts only when necessary."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from contract.images.header import GRANULE_BYTES, align


@dataclass(frozen=True, slots=True)
class Extent:
    """Image bytes [image_offset, image_offset + num_bytes) lie at [start, start + num_bytes)."""

    image_offset: int
    start: int
    num_bytes: int

    def __post_init__(self) -> None:
        assert self.num_bytes > 0
        assert not (self.start | self.num_bytes) % GRANULE_BYTES, "an extent of half granules"

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class ExtentAllocator:
    """Allocates byte ranges of one memory of `capacity` bytes, in granules of 256 bytes.

    Free ranges are kept sorted, disjoint and never adjacent.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self.capacity = capacity // GRANULE_BYTES * GRANULE_BYTES
        self._starts: list[int] = [0] if self.capacity else []
        self._sizes: list[int] = [self.capacity] if self.capacity else []

    @classmethod
    def with_used(cls, capacity: int, used: Iterable[Extent]) -> ExtentAllocator:
        """Returns a memory in which only these extents, which do not overlap, are used."""
        made = cls(capacity)
        made._starts, made._sizes = [], []
        position = 0
        ends = [(extent.start, extent.end) for extent in used]
        for start, end in (*sorted(ends), (made.capacity, made.capacity)):
            if start > position:
                made._starts.append(position)
                made._sizes.append(start - position)
            position = end
        return made

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def largest_free_bytes(self) -> int:
        return max(self._sizes, default=0)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Pairs of start and bytes, ascending."""
        return list(zip(self._starts, self._sizes, strict=True))

    @property
    def num_free_ranges(self) -> int:
        return len(self._sizes)

    def copy(self) -> ExtentAllocator:
        """Returns an equal allocator to plan with."""
        other = ExtentAllocator(0)
        other.capacity = self.capacity
        other._starts, other._sizes = list(self._starts), list(self._sizes)
        return other

    def allocate(self, num_bytes: int, cuts: Sequence[int]) -> tuple[Extent, ...] | None:
        """Allocates `num_bytes`, in one extent if any hole fits, else cut at some of `cuts`.

        `cuts` are the ascending image offsets, multiples of 256, where the image may be cut.
        Returns None, and changes nothing, when it does not fit.
        """
        size = align(num_bytes)
        if size == 0:
            return ()
        for start, hole in zip(self._starts, self._sizes, strict=True):
            if hole >= size:
                return self._take([Extent(0, start, size)])
        pieces = self._cut(size, cuts)
        return None if pieces is None else self._take(pieces)

    def _cut(self, size: int, cuts: Sequence[int]) -> list[Extent] | None:
        """Fills the largest holes first, which makes the fewest pieces."""
        if self.free_bytes < size:
            return None
        ends = [cut for cut in cuts if 0 < cut < size] + [size]
        pieces: list[Extent] = []
        position = 0
        for hole, start in sorted(zip(self._sizes, self._starts, strict=True), reverse=True):
            index = bisect.bisect_right(ends, position + hole) - 1
            if index < 0 or ends[index] <= position:
                continue
            pieces.append(Extent(position, start, ends[index] - position))
            position = ends[index]
            if position == size:
                return pieces
        return None

    def _take(self, pieces: list[Extent]) -> tuple[Extent, ...]:
        for piece in pieces:
            index = self._starts.index(piece.start)
            self._starts[index] += piece.num_bytes
            self._sizes[index] -= piece.num_bytes
            if self._sizes[index] == 0:
                del self._starts[index], self._sizes[index]
        return tuple(pieces)

    def free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._insert_free(extent.start, extent.num_bytes)

    def _insert_free(self, start: int, size: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        after = self._starts[index] if index < len(self._starts) else self.capacity
        before = self._starts[index - 1] + self._sizes[index - 1] if index else 0
        assert before <= start <= start + size <= after, "freed twice"
        self._starts.insert(index, start)
        self._sizes.insert(index, size)
        if index + 1 < len(self._starts) and start + size == after:
            self._merge(index)
        if index and before == start:
            self._merge(index - 1)

    def _merge(self, index: int) -> None:
        self._sizes[index] += self._sizes[index + 1]
        del self._starts[index + 1], self._sizes[index + 1]

    def check_integrity(self, used: Sequence[Extent]) -> None:
        """Asserts that `used` and the free ranges tile the memory exactly."""
        ranges = [(e.start, e.num_bytes) for e in used]
        ranges += list(zip(self._starts, self._sizes, strict=True))
        position = 0
        for start, size in sorted(ranges):
            assert start == position, f"gap or overlap at byte {position}"
            assert size > 0
            assert size % GRANULE_BYTES == 0
            position += size
        assert position == self.capacity, "bytes are missing"


def locate(extents: Sequence[Extent], offsets: np.ndarray) -> np.ndarray:
    """Returns the memory's byte offsets, int64 [n], of image offsets, int64 [n]."""
    ordered = sorted(extents, key=lambda extent: extent.image_offset)
    firsts = np.array([extent.image_offset for extent in ordered], dtype=np.int64)
    index = np.searchsorted(firsts, offsets, side="right") - 1
    assert (index >= 0).all(), "an image offset lies in no extent"
    within = offsets - firsts[index]
    sizes = np.array([extent.num_bytes for extent in ordered], dtype=np.int64)
    assert (within < sizes[index]).all(), "an image offset lies in no extent"
    return np.array([extent.start for extent in ordered], dtype=np.int64)[index] + within
