"""Where a native step's rows find recurrent states: fixed memory, which each step fills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from inference_svc.backends.native.buffers import StepArrays
from inference_svc.core import BatchRow
from inference_svc.model.recurrent_states import RecurrentStates, Segment
from kernels.recurrence.native import StateRows


class NativeStates:
    """The `memory` of states, and the segments of a step's rows, which `step` describes."""

    def __init__(self, memory: RecurrentStates, step: StepArrays) -> None:
        self.memory = memory
        max_rows, max_segments = len(step.context_lengths), len(step.positions)
        self.rows = StateRows(
            step.num_rows,
            *(torch.zeros(size, dtype=torch.int32) for size in (max_rows + 1, max_segments + 1)),
            *(torch.zeros(max_segments, dtype=torch.int32) for _ in range(2)),
        )

    def fill(self, rows: Sequence[BatchRow]) -> None:
        """Describes the states of a batch's rows."""
        segments = chain.from_iterable(map(self.memory.segments, rows))
        self.fill_segments([*segments], [row.num_tokens for row in rows])

    def fill_segments(self, segments: Sequence[Segment], row_counts: Sequence[int]) -> None:
        """Describes the states of rows with so many tokens, by the segments of all."""
        read, written, counts = zip(*segments, strict=True)
        ends = np.cumsum(counts)
        num_rows = len(row_counts)
        self.rows.firsts.numpy()[1 : num_rows + 1] = ends.searchsorted(np.cumsum(row_counts)) + 1
        self.rows.starts.numpy()[1 : len(counts) + 1] = ends
        self.rows.read.numpy()[: len(read)] = read
        self.rows.written.numpy()[: len(written)] = written
