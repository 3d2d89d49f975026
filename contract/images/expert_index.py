"""The index at the start of a segment of experts: where each expert's matrix lies in the segment.

It is int32 [experts held, 4]: granule of the expert's matrix within the segment, rank, bits of the
scale (float32), 0. Each matrix begins on a granule; those with the same bytes lie there once. An
expert that the adapter lacks has rank 0.
"""

from __future__ import annotations

import numpy as np

from contract.images.header import GRANULE_BYTES, InvalidImage, Segment, align
from contract.images.segment_kinds import SegmentKind

INDEX_FIELDS = 4
INDEX_BYTES = 4 * INDEX_FIELDS
"""Bytes of an expert in an index."""


def index_bytes(num_experts: int) -> int:
    """Returns where the first matrix of a segment of so many experts may start."""
    return align(num_experts * INDEX_BYTES)


class ExpertIndex:
    """An index that is being written. `end` is where the next matrix may start."""

    def __init__(self, num_experts: int, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._fields = np.zeros((num_experts, INDEX_FIELDS), "<i4")
        self._fields[:, 2] = np.float32(1.0).view(np.int32)
        self.end = index_bytes(num_experts)

    def add(self, expert: int, start: int, rank: int) -> None:
        """Places an expert's matrix of this rank at a byte of the segment: at `end`, or where
        an earlier expert's lies that has the same bytes."""
        if start == self.end:
            self.end = align(start + rank * self._row_bytes)
        self._fields[expert, :2] = start // GRANULE_BYTES, rank

    @property
    def rank(self) -> int:
        """The segment's rank: the largest of any expert."""
        return int(self._fields[:, 1].max(initial=0))

    def to_bytes(self) -> bytes:
        return self._fields.tobytes()


def read_ranks(content: bytes, segment: Segment, num_experts: int, row_bytes: int) -> np.ndarray:
    """Reads the index of a segment. Kernels compute with its values.

    Args:
        content: The first bytes of the segment: its index.
        segment: The segment.
        num_experts: Experts that the layout holds.
        row_bytes: Bytes of one row of a matrix.

    Returns:
        The rank of each expert, int64 [experts].

    Raises:
        InvalidImage: A matrix is not aligned, not within the segment, or of a larger rank.
    """
    index = np.frombuffer(content, np.int32).reshape(num_experts, -1)
    granules, ranks = index[:, :2].astype(np.int64).T
    scales = index[:, 2].copy().view(np.float32)
    ends = granules * GRANULE_BYTES + ranks * row_bytes
    is_within = granules * GRANULE_BYTES >= index_bytes(num_experts)
    is_within &= ends <= segment.length_bytes
    is_right = (ranks == 0) | ((ranks > 0) & (ranks <= segment.rank) & is_within)
    is_right &= (scales == 1.0) | ((segment.kind is SegmentKind.B) & np.isfinite(scales))
    if not is_right.all():
        expert = int(np.flatnonzero(~is_right)[0])
        raise InvalidImage(f"expert {expert} of the segment at byte {segment.offset} is misplaced")
    if int(ranks.max(initial=0)) != segment.rank:
        raise InvalidImage(f"experts of the segment at byte {segment.offset} have other ranks")
    return ranks
