"""The table: where each adapter's A and B lie in the arena.

The arena is one flat tensor. An A or B starts on a granule of 256 bytes, so that its position fits
in an int32 and every kernel can prove its loads aligned. Row `slot` of the table holds, for each
target, the granules of A and B, the rank (0 = the adapter does not have this target) and a scale.
The table's memory never moves, so a captured graph sees every later write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.streams import Stream, Streams

GRANULE_BYTES = 256


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One target of one adapter.

    A is `[rank, in_features]` row-major at byte `a_granule * 256` of the arena (an embedding's A is
    `[in_features, rank]`, one row per token id); B is `[rank, out_features]` at `b_granule * 256`.
    """

    target: int
    a_granule: int
    b_granule: int
    rank: int
    in_features: int
    out_features: int
    scale: float = 1.0
    is_embedding: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class TableRow:
    """All targets of one adapter, in ascending order, as arrays [n]: see TableEntry.

    Integers are int64, `scales` fp32, `is_embedding` bool.
    """

    targets: np.ndarray
    a_granules: np.ndarray
    b_granules: np.ndarray
    ranks: np.ndarray
    in_features: np.ndarray
    out_features: np.ndarray
    scales: np.ndarray
    is_embedding: np.ndarray
    target_set: frozenset[int] = field(init=False)
    max_rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_set", frozenset(self.targets.tolist()))
        object.__setattr__(self, "max_rank", int(self.ranks.max(initial=0)))
        assert len(self.target_set) == len(self.targets), "a target appears twice"

    @classmethod
    def of(cls, entries: Sequence[TableEntry]) -> TableRow:
        entries = sorted(entries, key=lambda entry: entry.target)
        return cls(
            np.array([entry.target for entry in entries], dtype=np.int64),
            np.array([entry.a_granule for entry in entries], dtype=np.int64),
            np.array([entry.b_granule for entry in entries], dtype=np.int64),
            np.array([entry.rank for entry in entries], dtype=np.int64),
            np.array([entry.in_features for entry in entries], dtype=np.int64),
            np.array([entry.out_features for entry in entries], dtype=np.int64),
            np.array([entry.scale for entry in entries], dtype=np.float32),
            np.array([entry.is_embedding for entry in entries], dtype=np.bool_),
        )


NO_ADAPTER = TableRow.of([])


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Views into the arena, made when first used. For an embedding `a` is `[vocab, rank]`."""

    a: torch.Tensor
    a_t: torch.Tensor
    b: torch.Tensor
    b_t: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class LoraTable:
    """Rows of adapters, `[max_loras, num_targets]`, at a fixed address on `device`.

    `rows` is int32 `[max_loras, 4, num_targets]`: granule of A, granule of B, rank, and the bits of
    the fp32 scale; one row is one copy. `adapters[slot]` says the same to the host.
    """

    max_loras: int
    num_targets: int
    max_rank: int
    arena: torch.Tensor
    rows: torch.Tensor
    stream: Stream = field(repr=False)
    adapters: list[TableRow] = field(repr=False)
    _weights: tuple[dict[int, TargetWeights], ...] = field(repr=False)

    @classmethod
    def create(
        cls,
        max_loras: int,
        num_targets: int,
        arena: torch.Tensor,
        device: torch.device | str,
        max_rank: int = 256,
        stream: Stream | None = None,
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
        rows = torch.zeros(max_loras, 4, num_targets, dtype=torch.int32, device=device)
        adapters = [NO_ADAPTER] * max_loras
        weights: tuple[dict[int, TargetWeights], ...] = tuple({} for _ in range(max_loras))
        stream = stream or Streams.of(rows.device).compute
        return cls(max_loras, num_targets, max_rank, arena, rows, stream, adapters, weights)

    @property
    def a_granules(self) -> torch.Tensor:
        """int32 `[max_loras, num_targets]`, a view of `rows`; likewise the three below."""
        return self.rows[:, 0]

    @property
    def b_granules(self) -> torch.Tensor:
        return self.rows[:, 1]

    @property
    def ranks(self) -> torch.Tensor:
        return self.rows[:, 2]

    @property
    def scales(self) -> torch.Tensor:
        return self.rows[:, 3].view(torch.float32)

    def set_row(self, slot: int, adapter: TableRow | Sequence[TableEntry]) -> None:
        """Makes an adapter visible: one write, ordered on the table's stream.

        The bytes that it points to must be in the arena before any later work of that stream.
        """
        if not isinstance(adapter, TableRow):
            adapter = TableRow.of(adapter)
        self._check(adapter)
        row = np.zeros((4, self.num_targets), dtype=np.int32)
        targets = adapter.targets
        row[0, targets] = adapter.a_granules
        row[1, targets] = adapter.b_granules
        row[2, targets] = adapter.ranks
        row[3].view(np.float32)[targets] = adapter.scales
        self._write(slot, torch.from_numpy(row))
        self._weights[slot].clear()
        self.adapters[slot] = adapter

    def clear_row(self, slot: int) -> None:
        """Forgets the adapter of `slot`: all its ranks become 0."""
        self._write(slot, torch.zeros(4, self.num_targets, dtype=torch.int32))
        self._weights[slot].clear()
        self.adapters[slot] = NO_ADAPTER

    def weights(self, slot: int) -> dict[int, TargetWeights]:
        """What the adapter of `slot` has of each of its targets, for kernels that run on tensors.
        Native ones and those of a GPU read `rows`, and loading for them makes no tensors."""
        views, adapter = self._weights[slot], self.adapters[slot]
        if len(views) < len(adapter.targets):
            for index, target in enumerate(adapter.targets.tolist()):
                views[target] = self._views(adapter, index)
        return views

    def _check(self, adapter: TableRow) -> None:
        """Asserts that ranks are as promised, and both matrices of each target in the arena."""
        size = self.arena.numel() * self.arena.itemsize
        ranks = adapter.ranks
        wrong = (ranks < 1) | (ranks > self.max_rank)
        assert not wrong.any(), f"rank {ranks[wrong][0]} of target {adapter.targets[wrong][0]}"
        for granules, features in (
            (adapter.a_granules, adapter.in_features),
            (adapter.b_granules, adapter.out_features),
        ):
            ends = granules * GRANULE_BYTES + ranks * features * self.arena.itemsize
            outside = (granules < 0) | (ends > size)
            assert not outside.any(), f"granule {granules[outside][0]} leaves the arena"

    def _write(self, slot: int, row: torch.Tensor) -> None:
        assert 0 <= slot < self.max_loras, f"slot {slot} of {self.max_loras}"
        if self.rows.is_cuda:
            # Torch keeps the pinned block alive until the copy has run.
            row = row.pin_memory()
        self.stream.copy([(self.rows[slot], row)])

    def _views(self, adapter: TableRow, index: int) -> TargetWeights:
        rank = int(adapter.ranks[index])
        a_shape = (int(adapter.in_features[index]), bool(adapter.is_embedding[index]))
        a = self._matrix(int(adapter.a_granules[index]), rank, *a_shape)
        b = self._matrix(int(adapter.b_granules[index]), rank, int(adapter.out_features[index]))
        return TargetWeights(a, a.t(), b, b.t(), float(adapter.scales[index]))

    def _matrix(
        self, granule: int, rank: int, num_features: int, transposed: bool = False
    ) -> torch.Tensor:
        start = granule * (GRANULE_BYTES // self.arena.itemsize)
        end = start + rank * num_features
        shape = (num_features, rank) if transposed else (rank, num_features)
        return self.arena[start:end].view(shape)
