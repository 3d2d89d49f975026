"""The experts that tokens have chosen, beside the pages of their keys and values, on the host.

A page's choices are written by the step that computes its keys and values, for requests that return
them. These share cached pages only with each other, so that they find choices wherever they find
keys and values; a page that is allocated anew is written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from inference_svc.core import BatchRow, Sequence
from inference_svc.results.routed_experts import ExpertLayers, ExpertsOption, RoutedExperts


class RoutedPages:
    """`num_pages` pages of `page_size` tokens. The system gives memory to a page when it is first
    written."""

    def __init__(self, shape: ExpertLayers, num_pages: int, page_size: int) -> None:
        self.shape = shape
        self._page_size = page_size
        width = len(shape.layers) * shape.num_chosen
        dtype = np.dtype(f"<u{shape.bytes_per_id}")
        self._ids = np.zeros((num_pages * page_size, width), dtype)
        self._is_written = np.zeros(num_pages, np.bool_)

    @property
    def capacity_bytes(self) -> int:
        return self._ids.nbytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the pages that were ever written."""
        return int(self._is_written.sum()) * self._page_size * self.shape.token_bytes

    def write(self, rows: Iterable[BatchRow], chosen: NDArray[np.generic]) -> None:
        """Writes the experts of a step's tokens, [layers, tokens, chosen], for rows that return
        them."""
        cells: list[int] = []
        tokens: list[int] = []
        first = 0
        for sequence, start, num_tokens, _ in rows:
            if sequence.request.wanted.get(ExpertsOption):
                cells += self._cells_of(sequence, start, start + num_tokens)
                tokens += range(first, first + num_tokens)
            first += num_tokens
        if not cells:
            return
        self._ids[cells] = chosen[:, tokens].swapaxes(0, 1).reshape(len(tokens), -1)
        self._is_written[np.array(cells) // self._page_size] = True

    def read_new(self, rows: Iterable[BatchRow]) -> Iterator[tuple[Sequence, RoutedExperts]]:
        """Yields the experts that were not returned yet of each row that samples and returns
        them."""
        for sequence, start, num_tokens, samples in rows:
            if samples and sequence.request.wanted.get(ExpertsOption):
                first = sequence.num_returned.get(RoutedExperts, 0)
                yield sequence, self.read(sequence, first, start + num_tokens)

    def read(self, sequence: Sequence, start: int, end: int) -> RoutedExperts:
        """Returns the experts of the tokens at positions [start, end), which are computed."""
        cells = self._cells_of(sequence, start, end)
        shape = self.shape
        return RoutedExperts(
            start,
            len(shape.layers),
            shape.num_chosen,
            shape.bytes_per_id,
            experts=self._ids[cells].tobytes(),
        )

    def _cells_of(self, sequence: Sequence, start: int, end: int) -> list[int]:
        size, pages = self._page_size, sequence.page_ids
        cells: list[int] = []
        while start < end:
            index, offset = divmod(start, size)
            count = min(size - offset, end - start)
            first = pages[index] * size + offset
            cells += range(first, first + count)
            start += count
        return cells


def routed_pages_bytes(shape: ExpertLayers | None, num_pages: int, page_size: int) -> int:
    """Returns the capacity of so many pages; 0 for a model without experts."""
    return 0 if shape is None else num_pages * page_size * shape.token_bytes
