"""The segments of a step: where its tokens find states, and leave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NOWHERE = -1
"""The slot of a state that nobody reads, as padding's: it is not stored."""

IntArray = NDArray[np.int32]


class Segments(NamedTuple):
    """The tokens of a step, one segment after another: segment i has `counts[i]` of them, and
    reads and writes the state in these slots. Each may read the state that the one before it has
    written. Kernels on a device read `on_device` alone."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    counts: tuple[int, ...]
    on_device: DeviceSegments | None = None

    def parts(self) -> Iterator[tuple[Segments, slice | list[int]]]:
        """Yields each segment with the places of its tokens; those of one
        token that depend on no other come all at once."""
        alone: list[tuple[int, int, int]] = []
        first = 0
        for index, (read, written, count) in enumerate(
            zip(self.read, self.written, self.counts, strict=True)
        ):
            if count == 1 and not self._is_linked(index):
                alone.append((read, written, first))
            else:
                yield Segments((read,), (written,), (count,)), slice(first, first + count)
            first += count
        if alone:
            reads, writes, tokens = zip(*alone, strict=True)
            yield Segments(reads, writes, (1,) * len(tokens)), list(tokens)

    def _is_linked(self, index: int) -> bool:
        """Returns whether a segment continues the one before it, or the next one continues it."""
        reads_before = index > 0 and self.read[index] == self.written[index - 1]
        is_read = index + 1 < len(self.read) and self.read[index + 1] == self.written[index]
        return reads_before or is_read


class DeviceSegments(NamedTuple):
    """Segments by the row of the step: row r has the ones from firsts[r] to firsts[r + 1], each of
    which goes on with the one before. All are int32, on the device.

    firsts: [rows + 1].
    starts: [segments + 1], the first token of each.
    read, written: [segments], the slots of states; `NOWHERE`: none.
    tokens: [T, 3], for each token how many of its row are before it, the slot that its row reads
        first, and the slot that its segment writes, if it is the last one of it.
    has_steps, has_chunks: Whether there may be rows of one token, and of several.
    """

    firsts: Tensor
    starts: Tensor
    read: Tensor
    written: Tensor
    tokens: Tensor
    has_steps: bool
    has_chunks: bool

    @classmethod
    def build(
        cls, rows: Sequence[Sequence[tuple[int, int, int]]], device: torch.device | str
    ) -> DeviceSegments:
        """Describes rows whose segments are (slot read, slot written, number of tokens)."""
        read, written, counts = zip(*(each for row in rows for each in row), strict=True)
        lengths = [sum(count for *_, count in row) for row in rows]
        num_segments, int32 = len(read), np.int32
        arrays = SegmentArrays(
            firsts=np.zeros(len(rows) + 1, int32),
            starts=np.zeros(num_segments + 1, int32),
            read=np.zeros(num_segments, int32),
            written=np.zeros(num_segments, int32),
            tokens=np.zeros((sum(counts), 3), int32),
        )
        arrays.fill([len(row) for row in rows], read, written, counts)
        tensors = {
            name: torch.from_numpy(array).to(device) for name, array in arrays._asdict().items()
        }
        return cls(**tensors, has_steps=1 in lengths, has_chunks=max(lengths) > 1)


class SegmentArrays(NamedTuple):
    """The tensors of `DeviceSegments` on the host, with room for more."""

    firsts: IntArray
    starts: IntArray
    read: IntArray
    written: IntArray
    tokens: IntArray

    def fill(
        self,
        of_rows: Sequence[int],
        read: Sequence[int],
        written: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Describes the segments of rows that have so many of them each."""
        num_rows, num_segments = len(of_rows), len(read)
        ends, first_ones = np.cumsum(counts), np.cumsum(of_rows)
        num_tokens = int(ends[-1])
        self.firsts[1 : num_rows + 1] = first_ones
        self.starts[1 : num_segments + 1] = ends
        self.read[:num_segments], self.written[:num_segments] = read, written
        tokens = self.tokens[:num_tokens]
        if num_tokens == num_segments == num_rows and max(of_rows) == 1:  # and none is empty
            tokens[:, 0] = 0
            tokens[:, 1], tokens[:, 2] = read, written
            return
        # Of each segment the first one of its row, and of each token its segment's.
        of_segments = np.repeat(first_ones - of_rows, of_rows)
        of_tokens = np.repeat(of_segments, counts)
        tokens[:, 0] = np.arange(num_tokens) - self.starts[of_tokens]
        tokens[:, 1] = self.read[of_tokens]
        tokens[:, 2] = NOWHERE
        tokens[ends - 1, 2] = written
