"""The page table on the device: a step sends only the pages that it has and the one before had not.

Whole rows would be 8 MiB a step for 256 sequences of up to 131,072 tokens, on the stream that
computes.
"""

from __future__ import annotations

from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.streams import Stream

MAX_ROW_UPDATES = 2
"""New pages of a row that are written one by one; more, as of a prompt, are a copy."""


class PageUpdates:
    """Up to MAX_ROW_UPDATES cells per row of a table, with their new values, at fixed addresses.
    Unused ones write to a cell that nobody reads."""

    def __init__(self, cells: Tensor, pages: Tensor, spare_cell: int) -> None:
        """int64 and int32 [n], on the host."""
        self._cells, self._pages = cells.numpy(), pages.numpy()
        self._spare_cell = spare_cell
        self._cells[:] = spare_cell
        self._num_used = 0

    def set(self, cells: list[int], pages: list[int]) -> None:
        count = len(cells)
        self._cells[:count], self._pages[:count] = cells, pages
        self._cells[count : self._num_used] = self._spare_cell
        self._num_used = count


class PageTable:
    """The pages of up to `max_rows` sequences, up to `max_pages` each, as int32 on the device.

    A sequence keeps its row from step to step, wherever it stands in the batch; it is known by its
    list of pages, which only grows while it runs. The last row is padding's: all of its
    pages are `padding_page`.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        padding_page: int,
        device: torch.device,
        stream: Stream,
    ) -> None:
        self.padding_row, self.padding_page = max_rows, padding_page
        self.spare_cell = (max_rows + 1) * max_pages
        shape = (max_rows + 1, max_pages)
        flat = torch.zeros(self.spare_cell + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_host = flat[: self.spare_cell].view(shape)
        """The same on the host."""
        self.on_host[self.padding_row] = padding_page
        self._flat = flat.to(device, copy=True)
        self.on_device = self._flat[: self.spare_cell].view(shape)
        """int32 [max_rows + 1, max_pages], on the device."""
        self._table = self.on_host.numpy()
        self._row_of: dict[int, int] = {}  # by the id() of a list that is held below
        self._lists: list[list[int]] = [[] for _ in range(max_rows)]
        self._num_pages = np.zeros(max_rows, dtype=np.int64)
        self._last_used = np.zeros(max_rows, dtype=np.int64)
        self._step = 0
        self._pages_before: list[list[int]] = []
        self._rows_before = np.zeros(0, dtype=np.int64)
        self._copies: list[tuple[int, int, int]] = []
        self._is_open = False
        self.stream = stream
        """Has all that writes to the table or reads it, in order."""
        self._sent = stream.event()

    @property
    def num_bytes(self) -> int:
        """The size of each side."""
        return self._flat.nbytes

    def fill(self, pages: list[list[int]], updates: PageUpdates) -> NDArray[np.int64]:
        """Returns the row of each of these, the pages of the step's sequences. Cells that the
        device does not have yet are left to `send`, or is in `updates`, for `apply`."""
        if self._is_open:  # the step before was given up, and nobody knows where
            self._num_pages[:] = 0
        self._is_open = True
        self._step += 1
        is_same = len(pages) == len(self._pages_before)
        if not (is_same and all(map(is_, pages, self._pages_before))):
            self._pages_before, self._rows_before = pages, self._find_rows(pages)
        rows = self._rows_before
        self._last_used[rows] = self._step
        self._write(rows, pages, updates)
        return rows

    def _find_rows(self, pages: list[list[int]]) -> NDArray[np.int64]:
        rows = np.array([self._row_of.get(id(each), -1) for each in pages], dtype=np.int64)
        self._last_used[rows[rows >= 0]] = self._step
        for index in np.flatnonzero(rows < 0).tolist():
            rows[index] = self._assign(pages[index])
        return rows

    def _assign(self, pages: list[int]) -> int:
        """Returns the row that has not been used for longest, now of these."""
        self._sent.synchronize()  # it may still be read by a copy
        row = int(self._last_used.argmin())
        assert self._last_used[row] < self._step, "the batch has more rows than the table"
        self._row_of.pop(id(self._lists[row]), None)
        self._row_of[id(pages)], self._lists[row] = row, pages
        self._num_pages[row], self._last_used[row] = 0, self._step
        return row

    def _write(self, rows: NDArray[np.int64], pages: list[list[int]], updates: PageUpdates) -> None:
        counts = np.fromiter(map(len, pages), np.int64, len(pages))
        known, width = self._num_pages[rows], self._table.shape[1]
        cells: list[int] = []
        values: list[int] = []
        self._copies = []
        for index in np.flatnonzero(counts != known).tolist():
            row, first, end = int(rows[index]), int(known[index]), int(counts[index])
            new = pages[index][first:]
            self._table[row, first:end] = new
            if len(new) <= MAX_ROW_UPDATES:
                cells += range(row * width + first, row * width + end)
                values += new
            else:
                self._copies.append((row, first, end))
        self._num_pages[rows] = counts
        updates.set(cells, values)

    def send(self) -> None:
        """Copies the cells to the device that `fill` has left to it."""
        if self._copies:
            self.stream.copy(
                (self.on_device[row, first:end], self.on_host[row, first:end])
                for row, first, end in self._copies
            )
            self._sent.record()

    def apply(self, cells: Tensor, pages: Tensor) -> None:
        """Writes a step's updates, which lie on the device: `cells` int64 [n], `pages` int32
        [n]."""
        self._flat.index_copy_(0, cells, pages)

    def close(self) -> None:
        """Notes that all of the step is launched: the device will have the pages. Cells that are
        filled and not closed are sent again."""
        self._is_open = False
