"""One step's attention, in numbers: where each row's queries stand and where its cells lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import tuning

Ints = NDArray[np.int64]

TILE_QUERIES = 128
"""Most queries of one tile: neighbours of one row that read keys and values together."""
MAX_SEGMENTS = 64
"""Most segments that the context of a row of one query is cut into."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Row r's queries are tokens [query_starts[r], query_starts[r + 1]) of the step; they stand at
    positions [context_lengths[r] - number of queries, context_lengths[r]) of its sequence, and
    position j's cell is `page_table[table_rows[r], j // page_size] * page_size + j % page_size`.

    Device tensors: `cells` int64 [T] is where the step's tokens go; `query_starts` int32 [R + 1],
    `context_lengths` and `table_rows` int32 [R], `page_table` int32 [any, longest]. `tiles` int32
    [n, 2] cuts the rows of several queries: row, and first query in it. `segment_starts` int32
    [R + 1] numbers the segments of the rows of one query: row r's are [segment_starts[r],
    segment_starts[r + 1]). `has_decodes`: whether any row has one query. `ends` int32 [T] has the
    position before which each query sees all, if that is behind its own; None: each sees up to its
    own.
    The `host_` arrays are the same facts as numpy, the table's rows in the order of the step;
    `derived` memoises what a path makes of them.
    """

    cells: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    table_rows: Tensor
    page_table: Tensor
    tiles: Tensor
    segment_starts: Tensor
    has_decodes: bool
    page_size: int
    host_query_starts: Ints
    host_context_lengths: Ints
    host_page_table: Ints
    ends: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        first_positions: Sequence[int] | Ints,
        num_queries: Sequence[int] | Ints,
        page_ids: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        mutual: Sequence[tuple[int, int]] = (),
    ) -> AttentionPlan:
        """Row r computes `num_queries[r]` >= 1 tokens from `first_positions[r]` on; `page_ids[r]`
        hold at least all of its tokens up to the last of these. Tokens [start, end) of the step, of
        one row, that are `mutual` see each other in both directions."""
        firsts = np.asarray(first_positions, dtype=np.int64)
        counts = np.asarray(num_queries, dtype=np.int64)
        contexts = firsts + counts
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        table = _page_table(page_ids, contexts, page_size)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(starts[-1]) + (firsts - starts[:-1])[rows]
        return cls(
            cells=_to(cells_of(table, rows, positions, page_size), device),
            query_starts=_to(starts.astype(np.int32), device),
            context_lengths=_to(contexts.astype(np.int32), device),
            table_rows=_to(np.arange(len(counts), dtype=np.int32), device),
            page_table=_to(table.astype(np.int32), device),
            tiles=_to(query_tiles(counts), device),
            segment_starts=_to(segment_starts(counts, contexts), device),
            has_decodes=bool((counts == 1).any()),
            page_size=page_size,
            host_query_starts=starts,
            host_context_lengths=contexts,
            host_page_table=table,
            ends=_to(_ends(positions, mutual), device) if mutual else None,
        )

    @property
    def looking_back(self) -> AttentionPlan:
        """The plan of layers in which each query sees up to its own position."""
        if self.ends is None:
            return self
        key = "looking back"
        if key not in self.derived:
            self.derived[key] = replace(self, ends=None, derived={})
        found: AttentionPlan = self.derived[key]
        return found

    @property
    def num_rows(self) -> int:
        return len(self.host_context_lengths)

    @property
    def max_segments(self) -> int:
        """The most segments that rows of any length have which the page table can hold."""
        return max_segments(len(self.context_lengths), self.page_table.shape[1] * self.page_size)

    @property
    def device(self) -> torch.device:
        return self.cells.device


def cells_of(table: Ints, rows: Ints, positions: Ints, page_size: int) -> Ints:
    """Cell numbers of `positions` of `rows`; the two broadcast against each other."""
    return table[rows, positions // page_size] * page_size + positions % page_size


def query_tiles(num_queries: Ints) -> NDArray[np.int32]:
    """`AttentionPlan.tiles` of rows with so many queries each."""
    tiles_of = np.where(num_queries > 1, -(-num_queries // TILE_QUERIES), 0)
    rows = np.repeat(np.arange(len(num_queries)), tiles_of)
    first_tiles = np.cumsum(tiles_of) - tiles_of
    firsts = (np.arange(len(rows)) - first_tiles[rows]) * TILE_QUERIES
    return np.stack((rows, firsts), axis=1).astype(np.int32)


def segment_starts(num_queries: Ints | None, contexts: NDArray[Any]) -> NDArray[np.int32]:
    """`AttentionPlan.segment_starts` of rows with so many queries, None: one each, and so long
    contexts. A row's own context decides how it is cut: in the same way in any batch."""
    counts = _num_segments(contexts)
    if num_queries is not None:
        counts[num_queries != 1] = 0
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    counts.cumsum(out=starts[1:])
    return starts


def max_segments(num_rows: int, longest: int, positions: int | None = None) -> int:
    """Returns the most segments of a step of so many rows whose contexts are at most `longest`;
    `positions` stands for the constant of that name."""
    return num_rows * int(_num_segments(np.array([longest]), positions)[0])


def _num_segments(contexts: NDArray[Any], positions: int | None = None) -> NDArray[Any]:
    positions = positions or tuning.constants("segments")["positions"]
    counts: NDArray[Any] = (contexts + (positions - 1)) // positions
    np.minimum(counts, MAX_SEGMENTS, out=counts)
    return counts


def _page_table(page_ids: Sequence[Sequence[int]], contexts: Ints, page_size: int) -> Ints:
    counts = -(-contexts // page_size)
    table = np.zeros((len(counts), int(counts.max(initial=1))), dtype=np.int64)
    for row, (ids, count) in enumerate(zip(page_ids, counts.tolist(), strict=True)):
        assert len(ids) >= count, f"row {row} has {len(ids)} pages and needs {count}"
        table[row, :count] = ids[:count]
    return table


def _ends(positions: Ints, mutual: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    ends = positions.astype(np.int32) + 1
    for start, end in mutual:
        ends[start:end] = ends[end - 1]
    return ends


def _to(array: NDArray[Any], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
