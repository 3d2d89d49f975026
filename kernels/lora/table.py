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
    the fp32 scale; one row is one copy. `entries[slot]` says the same to the host, by target.
    """

    max_loras: int
    num_targets: int
    max_rank: int
    arena: torch.Tensor
    rows: torch.Tensor
    entries: tuple[dict[int, TableEntry], ...] = field(repr=False)
    _weights: tuple[dict[int, TargetWeights], ...] = field(repr=False)

    @classmethod
    def create(
        cls,
        max_loras: int,
        num_targets: int,
        arena: torch.Tensor,
        device: torch.device | str,
        max_rank: int = 256,
    ) -> LoraTable:
        """An empty table over `arena` `[arena_bytes // itemsize]` of the layout's dtype.

        `max_rank` bounds the rank of any entry; kernels size their workspace with it, nothing else.
        """
        assert arena.dim() == 1, "the arena is one flat tensor"
        assert arena.is_contiguous()
        # Vector loads need it; torch aligns CUDA memory to 512 bytes and CPU memory to 64.
        assert arena.data_ptr() % GRANULE_BYTES == 0 or arena.device.type == "cpu"
        assert arena.numel() * arena.itemsize // GRANULE_BYTES < 2**31, "granules are int32"
        rows = torch.zeros(max_loras, 4, num_targets, dtype=torch.int32, device=device)
        entries: tuple[dict[int, TableEntry], ...] = tuple({} for _ in range(max_loras))
        weights: tuple[dict[int, TargetWeights], ...] = tuple({} for _ in range(max_loras))
        return cls(max_loras, num_targets, max_rank, arena, rows, entries, weights)

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

    def set_row(self, slot: int, entries: Sequence[TableEntry]) -> None:
        """Makes an adapter visible: one write, ordered on the current stream.

        The bytes its entries point to must be in the arena before any later work of that stream.
        """
        by_target = {entry.target: entry for entry in entries}
        assert len(by_target) == len(entries), "a target appears twice"
        row = np.zeros((4, self.num_targets), dtype=np.int32)
        scales = row[3].view(np.float32)
        for target, entry in by_target.items():
            assert 0 < entry.rank <= self.max_rank, f"rank {entry.rank} of target {target}"
            self._check(entry)
            row[:3, target] = entry.a_granule, entry.b_granule, entry.rank
            scales[target] = entry.scale
        self._write(slot, torch.from_numpy(row))
        self._forget(slot)
        self.entries[slot].update(by_target)

    def clear_row(self, slot: int) -> None:
        """Forgets the adapter of `slot`: all its ranks become 0."""
        self._write(slot, torch.zeros(4, self.num_targets, dtype=torch.int32))
        self._forget(slot)

    def weights(self, slot: int) -> dict[int, TargetWeights]:
        """What the adapter of `slot` has of each of its targets, for kernels that run on tensors.
        Native ones and those of a GPU read `rows`, and loading for them makes no tensors."""
        views, entries = self._weights[slot], self.entries[slot]
        if len(views) < len(entries):
            views.update((target, self._views(entry)) for target, entry in entries.items())
        return views

    def _forget(self, slot: int) -> None:
        self.entries[slot].clear()
        self._weights[slot].clear()

    def _check(self, entry: TableEntry) -> None:
        """Asserts that both matrices lie within the arena."""
        size = self.arena.numel() * self.arena.itemsize
        for granule, features in (
            (entry.a_granule, entry.in_features),
            (entry.b_granule, entry.out_features),
        ):
            end = granule * GRANULE_BYTES + entry.rank * features * self.arena.itemsize
            assert granule >= 0, f"granule {granule} leaves the arena"
            assert end <= size, f"granule {granule} leaves the arena"

    def _write(self, slot: int, row: torch.Tensor) -> None:
        assert 0 <= slot < self.max_loras, f"slot {slot} of {self.max_loras}"
        if self.rows.is_cuda:
            # Torch keeps the pinned block alive until the copy has run.
            row = row.pin_memory()
        self.rows[slot].copy_(row, non_blocking=True)

    def _views(self, entry: TableEntry) -> TargetWeights:
        a = self._matrix(entry.a_granule, entry.rank, entry.in_features, entry.is_embedding)
        b = self._matrix(entry.b_granule, entry.rank, entry.out_features)
        return TargetWeights(a, a.t(), b, b.t(), entry.scale)

    def _matrix(
        self, granule: int, rank: int, num_features: int, transposed: bool = False
    ) -> torch.Tensor:
        start = granule * (GRANULE_BYTES // self.arena.itemsize)
        end = start + rank * num_features
        shape = (num_features, rank) if transposed else (rank, num_features)
        return self.arena[start:end].view(shape)
