"""The segments of a step's rows at fixed addresses on the device, refilled every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_svc.backends.cuda.inputs import ALIGNMENT_BYTES, StepBlock
from inference_svc.backends.cuda.padded_sizes import StepShape
from inference_svc.core import EMPTY_STATE, BatchColumns
from inference_svc.model.recurrent_states import (
    RecurrentPlan,
    RecurrentStates,
    Segment,
    segments_of,
)
from kernels.recurrence import NOWHERE, DeviceSegments, SegmentArrays

NUM_TENSORS = 5


class CudaSegments:
    """Segments of steps of up to `max_tokens` tokens of up to `max_rows` rows, in `block`. Rows
    that go on in the same step read the state in the slot `spare`."""

    def __init__(self, block: StepBlock, max_tokens: int, max_rows: int, spare: int) -> None:
        sizes = (max_rows + 1,), (max_tokens + 1,), (max_tokens,), (max_tokens,), (max_tokens, 3)
        host = [block.zeros(*size, dtype=torch.int32) for size in sizes]
        self._arrays = SegmentArrays(*(each.numpy() for each in host))
        firsts, starts, read, written, tokens = map(block.on_device, host)
        self._on_device = DeviceSegments(
            firsts, starts, read, written, tokens, has_steps=True, has_chunks=True
        )
        self._is_on_host = block.device.type == "cpu"
        self._spare = spare
        self._counts: list[int] = []
        """The tokens of each row."""

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int) -> int:
        """Returns its bytes in the block, at most."""
        return 4 * (6 * max_tokens + 1 + max_rows + 1) + NUM_TENSORS * ALIGNMENT_BYTES

    def fill(self, batch: BatchColumns | None, shape: StepShape | None) -> None:
        """Describes a batch, None: of no rows, and padding up to `shape`. Padding reads no state,
        and none of it is stored."""
        self._counts = [] if batch is None else list(batch.counts)
        if batch is not None and batch.is_decode:
            self._fill_decodes(batch, len(self._counts) if shape is None else shape.num_rows)
            return
        self._fill([] if batch is None else self._segments_of(batch), shape)

    def fill_rows(
        self, segments: Sequence[Segment], counts: Sequence[int], shape: StepShape | None
    ) -> None:
        """Does the same for segments of rows of so many tokens, one row behind the other."""
        self._counts = list(counts)
        by_row: list[list[Segment]] = []
        left = iter(segments)
        for count in counts:
            row: list[Segment] = []
            while sum(each.num_tokens for each in row) < count:
                row.append(next(left))
            by_row.append(row)
        self._fill(by_row, shape)

    def _fill(self, by_row: list[list[Segment]], shape: StepShape | None) -> None:
        if shape is not None:
            by_row += self._padding(shape)
        segments = [each for row in by_row for each in row]
        read, written, counts = zip(*segments, strict=True)
        self._arrays.fill([len(row) for row in by_row], read, written, counts)

    def _segments_of(self, batch: BatchColumns) -> list[list[Segment]]:
        sequences, starts, counts, _ = batch
        rows = zip(sequences, starts, counts, strict=True)
        return [[*segments_of(*row, self._spare)] for row in rows]

    def _fill_decodes(self, batch: BatchColumns, num_rows: int) -> None:
        """Does the same for rows of one token, of which each is a segment, in fewer operations."""
        spare, padding = self._spare, num_rows - len(batch.sequences)
        read = [
            sequence.state_read if start == sequence.num_computed else spare
            for sequence, start in zip(batch.sequences, batch.starts, strict=True)
        ]
        written = [sequence.state_written for sequence in batch.sequences]
        assert EMPTY_STATE not in written, "a sequence does not run"
        ones = [1] * num_rows
        read += [EMPTY_STATE] * padding
        written += [NOWHERE] * padding
        self._arrays.fill(ones, read, written, ones)

    def _padding(self, shape: StepShape) -> list[list[Segment]]:
        """Returns the rows of padding: of one token each, or empty ones, and then one that has all
        other tokens."""
        num_rows, num_tokens = len(self._counts), shape.num_tokens - sum(self._counts)
        if not shape.has_prompts:
            return [[Segment(EMPTY_STATE, NOWHERE, 1)] for _ in range(num_tokens)]
        last = [Segment(EMPTY_STATE, NOWHERE, num_tokens)] if num_tokens else []
        return [*([] for _ in range(shape.num_rows - num_rows)), last]

    def plan(self, states: RecurrentStates, shape: StepShape | None) -> RecurrentPlan:
        """Returns the filled segments, or, of a step padded to `shape`, any of it, as views of the
        device's side."""
        has_steps, has_chunks = True, True
        if shape is None:
            num_rows, num_tokens = len(self._counts), sum(self._counts)
            has_steps, has_chunks = 1 in self._counts, max(self._counts) > 1
        else:
            num_rows, num_tokens = shape.num_rows + shape.has_prompts, shape.num_tokens
            has_chunks = shape.has_prompts
        found = self._on_device
        on_device = found._replace(
            firsts=found.firsts[: num_rows + 1],
            tokens=found.tokens[:num_tokens],
            has_steps=has_steps,
            has_chunks=has_chunks,
        )
        segments = self._on_host(num_rows) if self._is_on_host else ()
        return RecurrentPlan(states, segments, on_device)

    def _on_host(self, num_rows: int) -> tuple[Segment, ...]:
        """Returns the segments of rows, for torch on a CPU."""
        firsts, starts, read, written, _ = self._arrays
        count = int(firsts[num_rows])
        counts = (starts[1 : count + 1] - starts[:count]).tolist()
        columns = read[:count].tolist(), written[:count].tolist(), counts
        return tuple(Segment(*each) for each in zip(*columns, strict=True))
