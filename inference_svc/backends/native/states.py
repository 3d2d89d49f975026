"""Where a native step's rows find recurrent states: fixed memory, which each step fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inference_svc.backends.native.buffers import StepArrays
from inference_svc.core import BatchRow
from inference_svc.model.recurrent_states import RecurrentStates
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
        by_row = [[*self.memory.segments(row)] for row in rows]
        read, written, counts = zip(
            *(each for segments in by_row for each in segments), strict=True
        )
        self.rows.firsts.numpy()[1 : len(rows) + 1] = np.cumsum([*map(len, by_row)])
        self.rows.starts.numpy()[1 : len(counts) + 1] = np.cumsum(counts)
        self.rows.read.numpy()[: len(read)] = read
        self.rows.written.numpy()[: len(written)] = written
