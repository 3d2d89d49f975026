"""The table: where each adapter's A and B lie in the arena.

The arena is one flat tensor. An A or B starts on a granule of 256 bytes, so that its position fits
in an int32 and every kernel can prove its loads aligned. Row `slot` of the table holds, for each
target, the granules of A and B, the rank of each and a scale. A B of rank 0 means that the adapter
does not have the target. The ranks differ where devices share the first product: each has a part of
A's rank, and the whole of B's. The table's memory never moves, so a captured graph sees every later
write.

Of a target that is a mixture of experts A and B are segments of an image. Each begins with an
index, int32 `[experts, 4]`: the granule of the expert's matrix within the segment, its rank (0 =
the adapter lacks the expert), bits of an fp32 scale, 0. B's is multiplied with the row's scale;
A's is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.streams import Stream, Streams

GRANULE_BYTES = 256
NUM_FIELDS = 5
"""Numbers of a target in a row: granules of A and B, ranks of A and B, bits of the scale."""

NO_EXPERT = -1
"""Stands for the expert where a target is one weight, and not a mixture's."""
INDEX_FIELDS = 4
INDEX_BYTES = 4 * INDEX_FIELDS
"""What an expert takes of an index."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One target of one adapter.

    A is `[a_rank, in_features]` row-major at byte `a_granule * 256` of the arena (an embedding's A
    is `[in_features, a_rank]`, one row per token id); B is `[rank, out_features]` at
    `b_granule * 256`. None: A's rank is B's. Of `num_experts` experts these are segments that begin
    with an index, each expert's matrices are of such shapes, and the ranks are the highest.
    """

    target: int
    a_granule: int
    b_granule: int
    rank: int
    in_features: int
    out_features: int
    scale: float = 1.0
    is_embedding: bool = False
    a_rank: int | None = None
    num_experts: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class TableRow:
    """All targets of one adapter, in ascending order, as arrays [n]: see TableEntry.

    Integers are int64, `scales` fp32, `is_embedding` bool. `max_rank` is B's.
    """

    targets: np.ndarray
    a_granules: np.ndarray
    b_granules: np.ndarray
    a_ranks: np.ndarray
    b_ranks: np.ndarray
    in_features: np.ndarray
    out_features: np.ndarray
    scales: np.ndarray
    is_embedding: np.ndarray
    num_experts: np.ndarray
    target_set: frozenset[int] = field(init=False)
    max_rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_set", frozenset(self.targets.tolist()))
        object.__setattr__(self, "max_rank", int(self.b_ranks.max(initial=0)))
        assert len(self.target_set) == len(self.targets), "a target appears twice"

    @classmethod
    def of(cls, entries: Sequence[TableEntry]) -> TableRow:
        entries = sorted(entries, key=lambda entry: entry.target)
        a_ranks = [entry.rank if entry.a_rank is None else entry.a_rank for entry in entries]
        return cls(
            np.array([entry.target for entry in entries], dtype=np.int64),
            np.array([entry.a_granule for entry in entries], dtype=np.int64),
            np.array([entry.b_granule for entry in entries], dtype=np.int64),
            np.array(a_ranks, dtype=np.int64),
            np.array([entry.rank for entry in entries], dtype=np.int64),
            np.array([entry.in_features for entry in entries], dtype=np.int64),
            np.array([entry.out_features for entry in entries], dtype=np.int64),
            np.array([entry.scale for entry in entries], dtype=np.float32),
            np.array([entry.is_embedding for entry in entries], dtype=np.bool_),
            np.array([entry.num_experts for entry in entries], dtype=np.int64),
        )


NO_ADAPTER = TableRow.of([])


class Place(NamedTuple):
    """An A or B of one target of one adapter: where it starts, and its rank."""

    granule: int
    rank: int
    scale: float = 1.0

    def of_expert(self, arena: torch.Tensor, expert: int) -> Place:
        """Returns the place of one expert's matrix, where this is a segment of a mixture's."""
        if self.rank == 0:  # of all of them, or there is no segment
            return self
        start = self.granule * (GRANULE_BYTES // arena.itemsize)
        end = start + (expert + 1) * (INDEX_BYTES // arena.itemsize)
        granule, rank, scale_bits = arena[start:end].view(torch.int32)[-INDEX_FIELDS:-1]
        return Place(self.granule + int(granule), int(rank), float(scale_bits.view(torch.float32)))

    def matrix(
        self, arena: torch.Tensor, num_features: int, *, transposed: bool = False
    ) -> torch.Tensor:
        """Returns a view of its values, `[rank, num_features]` or the transpose."""
        start = self.granule * (GRANULE_BYTES // arena.itemsize)
        shape = (num_features, self.rank) if transposed else (self.rank, num_features)
        return arena[start : start + self.rank * num_features].view(shape)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Views into the arena, made when first used: `a` is `[a_rank, in]`, for an embedding
    `[vocab, a_rank]`; `b` is `[b_rank, out]`."""

    a: torch.Tensor
    a_t: torch.Tensor
    b: torch.Tensor
    b_t: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class LoraTable:
    """Rows of adapters, `[max_loras, num_targets]`, at a fixed address on `device`.

    `rows` is int32 `[max_loras, 5, num_targets]`: granule of A, granule of B, rank of A, rank of B,
    and the bits of the fp32 scale; one row is one copy. `adapters[slot]` says the same to the host.
    `rank_parts` is how many devices share A's rank: this one has the whole of it, or a part that is
    rounded up. With 1 the ranks of A and B are equal, and what shrink writes is what expand reads.
    """

    max_loras: int
    num_targets: int
    max_rank: int
    rank_parts: int
    arena: torch.Tensor
    rows: torch.Tensor
    stream: Stream = field(repr=False)
    adapters: list[TableRow] = field(repr=False)
    _weights: tuple[dict[int, dict[int, TargetWeights]], ...] = field(repr=False)

    @classmethod
    def create(
        cls,
        max_loras: int,
        num_targets: int,
        arena: torch.Tensor,
        device: torch.device | str,
        max_rank: int = 256,
        stream: Stream | None = None,
        rank_parts: int = 1,
    ) -> LoraTable:
        """An empty table over `arena` `[arena_bytes // itemsize]` of the layout's dtype, written on
        `stream`; None: the one that computes.

        `max_rank` bounds the rank of any entry; kernels size their workspace with it, nothing else.
        """
        assert arena.dim() == 1, "the arena is one flat tensor"
        assert arena.is_contiguous()
        # Vector loads need it; torch aligns CUDA memory to 512 bytes and CPU memory to 64.
        assert arena.data_ptr() % GRANULE_BYTES == 0 or arena.device.type == "cpu"
        assert arena.numel() * arena.itemsize // GRANULE_BYTES < 2**31, "granules are int32"
        rows = torch.zeros(max_loras, NUM_FIELDS, num_targets, dtype=torch.int32, device=device)
        return cls(
            max_loras,
            num_targets,
            max_rank,
            rank_parts,
            arena,
            rows,
            stream or Streams.of(rows.device).compute,
            adapters=[NO_ADAPTER] * max_loras,
            _weights=tuple({} for _ in range(max_loras)),
        )

    @property
    def a_granules(self) -> torch.Tensor:
        """int32 `[max_loras, num_targets]`, a view of `rows`; likewise the four below."""
        return self.rows[:, 0]

    @property
    def b_granules(self) -> torch.Tensor:
        return self.rows[:, 1]

    @property
    def a_ranks(self) -> torch.Tensor:
        return self.rows[:, 2]

    @property
    def b_ranks(self) -> torch.Tensor:
        return self.rows[:, 3]

    @property
    def scales(self) -> torch.Tensor:
        return self.rows[:, 4].view(torch.float32)

    def set_row(self, slot: int, adapter: TableRow | Sequence[TableEntry]) -> None:
        """Makes an adapter visible: one write, ordered on the table's stream.

        The bytes that it points to must be in the arena before any later work of that stream.
        """
        if not isinstance(adapter, TableRow):
            adapter = TableRow.of(adapter)
        self._check(adapter)
        row = np.zeros((NUM_FIELDS, self.num_targets), dtype=np.int32)
        targets = adapter.targets
        row[0, targets] = adapter.a_granules
        row[1, targets] = adapter.b_granules
        row[2, targets] = adapter.a_ranks
        row[3, targets] = adapter.b_ranks
        row[4].view(np.float32)[targets] = adapter.scales
        self._write(slot, torch.from_numpy(row))
        self._weights[slot].clear()
        self.adapters[slot] = adapter

    def clear_row(self, slot: int) -> None:
        """Forgets the adapter of `slot`: all its ranks become 0."""
        self._write(slot, torch.zeros_like(self.rows[slot], device="cpu"))
        self._weights[slot].clear()
        self.adapters[slot] = NO_ADAPTER

    def weights(self, slot: int, expert: int = NO_EXPERT) -> dict[int, TargetWeights]:
        """What the adapter of `slot` has of each of its targets, or of this expert of those that
        are mixtures; for kernels that run on tensors. Native ones and those of a GPU read `rows`,
        and loading for them makes no tensors."""
        views = self._weights[slot].get(expert)
        if views is None:
            adapter = self.adapters[slot]
            of_experts = adapter.num_experts > 0
            views = self._weights[slot][expert] = {
                int(adapter.targets[index]): found
                for index in np.flatnonzero(of_experts == (expert != NO_EXPERT)).tolist()
                if (found := self._views(adapter, index, expert)) is not None
            }
        return views

    def _check(self, adapter: TableRow) -> None:
        """Asserts that ranks are as promised, and both matrices of each target in the arena; of
        experts, both indices."""
        a_ranks, b_ranks = adapter.a_ranks, adapter.b_ranks
        lowest = np.where(adapter.num_experts > 0, 0, 1)  # it may lack all that are held here
        wrong = (b_ranks < lowest) | (b_ranks > self.max_rank)
        assert not wrong.any(), f"rank {b_ranks[wrong][0]} of target {adapter.targets[wrong][0]}"
        is_part = (a_ranks >= 0) & (a_ranks <= -(-b_ranks // self.rank_parts))
        wrong = (a_ranks != b_ranks) & ~(is_part & (self.rank_parts > 1))
        assert not wrong.any(), (
            f"rank {a_ranks[wrong][0]} of A of target {adapter.targets[wrong][0]}"
        )
        size = self.arena.numel() * self.arena.itemsize
        for granules, ranks, features in (
            (adapter.a_granules, a_ranks, adapter.in_features),
            (adapter.b_granules, b_ranks, adapter.out_features),
        ):
            num_bytes = np.where(
                adapter.num_experts > 0,
                adapter.num_experts * INDEX_BYTES,
                ranks * features * self.arena.itemsize,
            )
            outside = (granules < 0) | (granules * GRANULE_BYTES + num_bytes > size)
            assert not outside.any(), f"granule {granules[outside][0]} leaves the arena"

    def _write(self, slot: int, row: torch.Tensor) -> None:
        assert 0 <= slot < self.max_loras, f"slot {slot} of {self.max_loras}"
        if self.rows.is_cuda:
            # Torch keeps the pinned block alive until the copy has run.
            row = row.pin_memory()
        self.stream.copy([(self.rows[slot], row)])

    def _views(self, adapter: TableRow, index: int, expert: int) -> TargetWeights | None:
        """Returns None where the adapter lacks the expert."""
        a = Place(int(adapter.a_granules[index]), int(adapter.a_ranks[index]))
        b = Place(int(adapter.b_granules[index]), int(adapter.b_ranks[index]))
        if expert != NO_EXPERT:
            assert 0 <= expert < adapter.num_experts[index], f"expert {expert}"
            a, b = a.of_expert(self.arena, expert), b.of_expert(self.arena, expert)
            assert a.scale == 1.0, "the scale is B's"
            if b.rank == 0:
                return None
        num_in, num_out = int(adapter.in_features[index]), int(adapter.out_features[index])
        a_values = a.matrix(self.arena, num_in, transposed=bool(adapter.is_embedding[index]))
        b_values = b.matrix(self.arena, num_out)
        scale = float(adapter.scales[index]) * b.scale
        return TargetWeights(a_values, a_values.t(), b_values, b_values.t(), scale)
