"""Memory at fixed addresses for a program of native operations: one step's inputs, refilled in
place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.core import BatchColumns
from inference_svc.model.operations import Rows
from inference_svc.model.rope import Axes
from inference_svc.pictures.positions import NUM_AXES, PicturePositions
from kernels.attention.native import StepRows


class StepSize(NamedTuple):
    """The numbers of a step's tokens, rows, and tokens that get logits."""

    tokens: int
    rows: int
    logits: int


class PageRows(Protocol):
    """The pages of a step's sequences, each in a row of a table."""

    @property
    def host_table(self) -> Tensor:
        """int32 [rows, pages], on the host."""

    def fill(self, pages: list[list[int]]) -> NDArray[np.int64]:
        """Writes these, the pages of the batch's rows, to the table; returns the row of each."""


class BatchPages:
    """`PageRows` in the order of the batch. `host_table` is int32 [R, max_pages]."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.host_table = torch.zeros(max_rows, max_pages, dtype=torch.int32)
        self._table = self.host_table.numpy()
        self._row_numbers = np.arange(max_rows)
        # The table's contents: of each row the list, and how many of its pages.
        self._lists: list[list[int]] = [[] for _ in range(max_rows)]
        self._num_pages = np.zeros(max_rows, dtype=np.int64)

    def fill(self, pages: list[list[int]]) -> NDArray[np.int64]:
        num_rows = len(pages)
        num_pages = np.fromiter(map(len, pages), np.int64, num_rows)
        is_changed = num_pages != self._num_pages[:num_rows]
        if not all(map(is_, pages, self._lists)):
            is_changed |= [new is not old for new, old in zip(pages, self._lists, strict=False)]
        for row in np.flatnonzero(is_changed).tolist():
            self._table[row, : num_pages[row]] = pages[row]
            self._lists[row], self._num_pages[row] = pages[row], num_pages[row]
        return self._row_numbers[:num_rows]


class StepMemory(Protocol):
    """The inputs of a step at fixed addresses, as operations read them; see `StepArrays`."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def logit_rows(self) -> Tensor: ...

    @property
    def rows(self) -> StepRows: ...

    def count(self, rows: Rows) -> Tensor:
        """Returns where the number of these rows is, int32 [1]."""

    def positions_along(self, axes: Axes | None) -> tuple[Tensor, Tensor | None]: ...


class StepArrays:
    """Host memory for steps of up to `max_tokens` tokens of up to `max_rows` sequences.

    T tokens in the order of the batch's R rows. All of `token_ids`, `positions` and `cells` (where
    a token's keys and values go) are int64 [T]; `query_starts` int32 [R + 1] and `context_lengths`
    int32 [R] as in `kernels.attention.AttentionPlan`; `logit_rows` int64 [N], the last token of
    each row. Where pictures have `places` of their own, `axis_positions` are int64 [3, T]; where
    their tokens see each other, `ends` are int32 [T], as in `StepRows`. The counts `num_tokens`,
    `num_rows` and `num_logits`, which is N, are int32 [1].
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        page_size: int,
        pages: PageRows,
        zeros: Callable[..., Tensor] = torch.zeros,
        max_outputs: int | None = None,
        places: PicturePositions | None = None,
        *,
        has_ends: bool = False,
    ) -> None:
        """`zeros` allocates, as torch's does, on the CPU. At most `max_outputs` tokens have outputs
        at once, by default one of each row."""
        self.page_size = page_size
        self._places = places
        shape = NUM_AXES, max_tokens
        self.axis_positions = None if places is None else zeros(*shape, dtype=torch.int64)
        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.cells = zeros(max_tokens, dtype=torch.int64)
        self.query_starts = zeros(max_rows + 1, dtype=torch.int32)
        self.context_lengths = zeros(max_rows, dtype=torch.int32)
        self.logit_rows = zeros(max_outputs or max_rows, dtype=torch.int64)
        self.num_tokens = zeros(1, dtype=torch.int32)
        self.num_rows = zeros(1, dtype=torch.int32)
        self.num_logits = zeros(1, dtype=torch.int32)
        self.ends = zeros(max_tokens, dtype=torch.int32) if has_ends else None
        self._pages, self._table = pages, pages.host_table.numpy()
        self._token_ids, self._positions = self.token_ids.numpy(), self.positions.numpy()
        self._cells, self._logit_rows = self.cells.numpy(), self.logit_rows.numpy()
        self._query_starts = self.query_starts.numpy()
        self._context_lengths = self.context_lengths.numpy()
        self._counts = [n.numpy() for n in (self.num_tokens, self.num_rows, self.num_logits)]
        self._row_numbers = np.arange(max_rows)
        self._num_ends = 0
        self.size = StepSize(0, 0, 0)

    @property
    def rows(self) -> StepRows:
        """The inputs of attention where pages lie in the order of the batch."""
        return StepRows(
            self.num_rows,
            self.num_tokens,
            self.query_starts,
            self.context_lengths,
            self._pages.host_table,
            self.cells,
            self.ends,
        )

    def count(self, rows: Rows) -> Tensor:
        """Returns where the number of these rows is, int32 [1]: of all tokens, or of the ones that
        get logits."""
        return self.num_logits if rows is Rows.LOGITS else self.num_tokens

    def positions_along(self, axes: Axes | None) -> tuple[Tensor, Tensor | None]:
        """Returns the positions that turn heads, and, if tokens have several, which of them turns
        each pair, int32."""
        if axes is None:
            return self.positions, None
        assert self.axis_positions is not None, "tokens have several positions"
        return self.axis_positions, axes.of_pairs.int()

    def fill(self, batch: BatchColumns) -> None:
        """Describes `batch`."""
        sequences, starts, counts, _ = batch
        if len(sequences) == sum(counts):
            tokens = [s.token_ids[start] for s, start in zip(sequences, starts, strict=True)]
        else:
            tokens = []
            for sequence, start, count in zip(sequences, starts, counts, strict=True):
                tokens += sequence.token_ids[start : start + count]
        self.fill_rows(tokens, starts, counts, [sequence.page_ids for sequence in sequences])
        if self._places is not None and self.axis_positions is not None:
            total = self.size.tokens
            pictures = (sequence.request.pictures for sequence in sequences)
            out, rows = self.axis_positions.numpy()[:, :total], zip(pictures, counts, strict=True)
            self._places.fill(out, self._positions[:total], rows)

    def fill_rows(
        self,
        tokens: list[int],
        starts: Sequence[int],
        counts: Sequence[int],
        page_ids: list[list[int]],
    ) -> None:
        """Describes a batch by its tokens, and of each row the first position, the number of
        tokens, and the pages."""
        num_rows, firsts = len(starts), np.array(starts, dtype=np.int64)
        lengths = np.array(counts, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        total = int(ends[-1])
        if total == num_rows:
            positions, row_of_token = firsts, self._row_numbers[:num_rows]
        else:
            row_of_token = np.repeat(self._row_numbers[:num_rows], lengths)
            positions = np.arange(total) + (firsts - ends + lengths)[row_of_token]
        assert len(tokens) == total, "a row has tokens that are not known yet"
        table_rows = self._pages.fill(page_ids)
        page_indices, offsets = np.divmod(positions, self.page_size)
        pages = self._table[table_rows[row_of_token], page_indices]
        self._token_ids[:total] = tokens
        self._positions[:total] = positions
        self._cells[:total] = pages * np.int64(self.page_size) + offsets
        self._query_starts[1 : num_rows + 1] = ends
        self._context_lengths[:num_rows] = firsts + lengths
        self._logit_rows[:num_rows] = ends - 1
        self._set_counts(total, num_rows, num_rows)

    def fill_axes(self, axes: NDArray[np.int64] | None) -> None:
        """Has the tokens of filled rows these positions along all axes, int64 [3, T], where they
        have several; None: the ones of text."""
        if self.axis_positions is not None:
            total = self.size.tokens
            out = self.axis_positions.numpy()[:, :total]
            out[:] = self._positions[:total] if axes is None else axes

    def let_see(self, mutual: Sequence[tuple[int, int]]) -> None:
        """Lets the step's tokens [start, end), one picture's each, see each other. Without, each
        token sees up to its own position."""
        if not (mutual or self._num_ends):
            return
        assert self.ends is not None, "pictures' tokens see each other"
        self.ends[: self._num_ends] = 0
        for start, end in mutual:
            self.ends[start:end] = self.positions[end - 1] + 1
        self._num_ends = max((end for _, end in mutual), default=0)

    def choose(self, tokens: list[int]) -> None:
        """Has outputs computed of these tokens of the step, at most `max_outputs`, instead of the
        last one of each row."""
        self._logit_rows[: len(tokens)] = tokens
        self._set_counts(self.size.tokens, self.size.rows, len(tokens))

    def clear(self) -> None:
        """Describes a step of no rows."""
        self._set_counts(0, 0, 0)

    def pad(self, num_rows: int, page: int) -> None:
        """Adds decode rows up to `num_rows`, of one token each, that write nothing but `page`. All
        of the step's own rows must decode."""
        used = self.size.rows
        assert self.size.tokens == self.size.logits == used, "not only decode rows"
        padded = slice(used, num_rows)
        self._token_ids[padded] = 0
        self._positions[padded] = 0
        self._cells[padded] = page * self.page_size
        self._query_starts[used + 1 : num_rows + 1] = self._row_numbers[padded] + 1
        self._context_lengths[padded] = 1
        self._logit_rows[padded] = self._row_numbers[padded]
        self._set_counts(num_rows, num_rows, num_rows)

    def pad_prompts(self, num_tokens: int, num_rows: int, page: int) -> None:
        """Adds rows without tokens up to `num_rows`, and a row of its own, behind these, that has
        tokens up to `num_tokens` and reads and writes nothing but `page`."""
        tokens, rows, _ = self.size
        padding = np.arange(num_tokens - tokens)
        self._token_ids[tokens:num_tokens] = 0
        self._positions[tokens:num_tokens] = padding
        self._cells[tokens:num_tokens] = page * self.page_size + padding % self.page_size
        self._query_starts[rows + 1 : num_rows + 1] = tokens
        self._query_starts[num_rows + 1] = num_tokens
        self._context_lengths[rows:num_rows] = 0
        self._context_lengths[num_rows] = num_tokens - tokens
        self._logit_rows[rows:num_rows] = 0
        self._set_counts(num_tokens, num_rows + 1, num_rows)

    def _set_counts(self, *counts: int) -> None:
        self.size = StepSize(*counts)
        for array, count in zip(self._counts, counts, strict=True):
            array[0] = count
