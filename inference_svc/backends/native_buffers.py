"""Memory at fixed addresses for a program of native operations: one step's inputs, refilled in
place, and the workspace that it computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from inference_svc.core import Batch
from inference_svc.model.geometry import ModelGeometry
from kernels.attention.native import StepRows
from kernels.host_memory import allocate_host


class StepArrays:
    """Host memory for steps of up to `max_tokens` tokens of up to `max_rows` sequences with up to
    `max_pages` pages each.

    T tokens in the order of the batch's R rows, of which N sample. All of `token_ids`,
    `positions` and `cells` (where a token's keys and values go) are int64 [T]; `query_starts` int32
    [R + 1], `context_lengths` int32 [R] and `page_table` int32 [R, max_pages] as in
    `kernels.attention.AttentionPlan`; `logit_rows` int64 [N], the last token of each row that
    samples. The counts `num_tokens`, `num_rows` and `num_logits` are int32 [1].
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_pages: int,
        page_size: int,
        zeros: Callable[..., Tensor] = torch.zeros,
        zeros_of_table: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """`zeros` allocates, as torch's does, on the CPU; `zeros_of_table` the page table, the one
        that may be large."""
        self.page_size = page_size
        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.cells = zeros(max_tokens, dtype=torch.int64)
        self.query_starts = zeros(max_rows + 1, dtype=torch.int32)
        self.context_lengths = zeros(max_rows, dtype=torch.int32)
        self.page_table = zeros_of_table(max_rows, max_pages, dtype=torch.int32)
        self.logit_rows = zeros(max_rows, dtype=torch.int64)
        self.num_tokens = zeros(1, dtype=torch.int32)
        self.num_rows = zeros(1, dtype=torch.int32)
        self.num_logits = zeros(1, dtype=torch.int32)
        self._table = self.page_table.numpy()
        self._pages_of_row: list[list[int]] = [[] for _ in range(max_rows)]
        self._num_pages_of_row = [0] * max_rows

    @property
    def rows(self) -> StepRows:
        """The inputs of attention."""
        return StepRows(
            self.num_rows,
            self.num_tokens,
            self.query_starts,
            self.context_lengths,
            self.page_table,
            self.cells,
        )

    def fill(self, batch: Batch) -> int:
        """Describes `batch`, which has rows; returns N."""
        rows = batch.rows
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        total = int(ends[-1])
        if total == len(rows):
            tokens = [row.sequence.token_ids[row.start] for row in rows]
            positions, row_of_token = starts, np.arange(total)
        else:
            tokens = []
            for row in rows:
                tokens += row.sequence.token_ids[row.start : row.start + row.num_tokens]
            row_of_token = np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(total) + (starts - ends + counts)[row_of_token]
        assert len(tokens) == total, "a row has tokens that are not known yet"
        self._fill_pages(batch)
        pages = self._table[row_of_token, positions // self.page_size]
        self.token_ids.numpy()[:total] = tokens
        self.positions.numpy()[:total] = positions
        self.cells.numpy()[:total] = pages * self.page_size + positions % self.page_size
        self.query_starts.numpy()[1 : len(rows) + 1] = ends
        self.context_lengths.numpy()[: len(rows)] = starts + counts
        samples = ends[[row.samples for row in rows]] - 1
        self.logit_rows.numpy()[: len(samples)] = samples
        self.num_tokens[0], self.num_rows[0] = total, len(rows)
        self.num_logits[0] = len(samples)
        return len(samples)

    def clear(self) -> None:
        """Describes a step of no rows."""
        for counts in (self.num_tokens, self.num_rows, self.num_logits):
            counts[0] = 0

    def pad(self, num_rows: int, page: int) -> None:
        """Adds decode rows up to `num_rows`, of one token each, that read and write nothing but
        `page`. All of the step's own rows must decode."""
        used = int(self.num_rows[0])
        assert self.num_tokens[0] == self.num_logits[0] == used, "not only decode rows"
        padded = slice(used, num_rows)
        self.token_ids.numpy()[padded] = 0
        self.positions.numpy()[padded] = 0
        self.cells.numpy()[padded] = page * self.page_size
        self.query_starts.numpy()[used + 1 : num_rows + 1] = np.arange(used + 1, num_rows + 1)
        self.context_lengths.numpy()[padded] = 1
        self.logit_rows.numpy()[padded] = np.arange(used, num_rows)
        self._table[padded, 0] = page
        self._num_pages_of_row[padded] = [-1] * (num_rows - used)  # to be filled again
        for counts in (self.num_tokens, self.num_rows, self.num_logits):
            counts[0] = num_rows

    def _fill_pages(self, batch: Batch) -> None:
        """Skips rows whose sequence and pages are those of the step before."""
        for index, row in enumerate(batch.rows):
            pages = row.sequence.page_ids
            if self._pages_of_row[index] is pages and self._num_pages_of_row[index] == len(pages):
                continue
            self._table[index, : len(pages)] = pages
            self._pages_of_row[index] = pages
            self._num_pages_of_row[index] = len(pages)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations of `max_tokens` tokens in the model's dtype, and fp32 logits of `max_logits`."""

    hidden: Tensor
    """[T, hidden_size]: the residual stream."""
    delta: Tensor
    """[T, hidden_size]: what the last block adds to it."""
    normed: Tensor
    """[T, hidden_size]"""
    qkv: Tensor
    """[T, q_size + 2 * kv_size]"""
    mixed: Tensor
    """[T, q_size]: attention's result."""
    gate_up: Tensor
    """[T, 2 * intermediate_size]"""
    gated: Tensor
    """[T, intermediate_size]"""
    last_hidden: Tensor
    """[N, hidden_size]: the residual stream of the rows that sample, from the last layer's
    attention on."""
    last_mixed: Tensor
    """[N, q_size]: the last layer's attention of these rows."""
    logits: Tensor
    """fp32 [N, vocab_size]"""

    @classmethod
    def allocate(
        cls, geometry: ModelGeometry, max_tokens: int, max_logits: int, dtype: torch.dtype
    ) -> Workspace:
        g = geometry

        def buffer(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return allocate_host(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)

        return cls(
            hidden=buffer(max_tokens, g.hidden_size),
            delta=buffer(max_tokens, g.hidden_size),
            normed=buffer(max_tokens, g.hidden_size),
            qkv=buffer(max_tokens, g.q_size + 2 * g.kv_size),
            mixed=buffer(max_tokens, g.q_size),
            gate_up=buffer(max_tokens, 2 * g.intermediate_size),
            gated=buffer(max_tokens, g.intermediate_size),
            last_hidden=buffer(max_logits, g.hidden_size),
            last_mixed=buffer(max_logits, g.q_size),
            logits=buffer(max_logits, g.vocab_size, torch.float32),
        )

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))
