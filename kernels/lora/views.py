"""Views into the arena: an adapter's values as tensors, at the places that its row says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from .rows import (
    ABSENT,
    GRANULE_BYTES,
    INDEX_BYTES,
    INDEX_FIELDS,
    NO_VECTORS,
    OutputVectors,
)


class Place(NamedTuple):
    """An A or B of one target of one adapter: where it starts, and its rank."""

    granule: int
    rank: int
    scale: float = 1.0

    def of_expert(self, arena: torch.Tensor, expert: int) -> Place:
        """Returns the place of one expert's matrix, if this is a segment of a mixture. arena:
        [arena_bytes // itemsize].
        """
        if self.rank == 0:  # of all of them, or there is no segment
            return self
        start = self.granule * (GRANULE_BYTES // arena.itemsize)
        end = start + (expert + 1) * (INDEX_BYTES // arena.itemsize)
        granule, rank, scale_bits = arena[start:end].view(torch.int32)[-INDEX_FIELDS:-1]
        return Place(self.granule + int(granule), int(rank), float(scale_bits.view(torch.float32)))

    def matrix(
        self,
        arena: torch.Tensor,
        num_features: int,
        dtype: torch.dtype | None = None,
        *,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Returns a view of its values, `[rank, num_features]` or the transpose, in `dtype`, or the
        arena's."""
        shape = (num_features, self.rank) if transposed else (self.rank, num_features)
        values = vector_at(arena, self.granule, self.rank * num_features, dtype)
        assert values is not None
        return values.view(shape)


class VectorValues(NamedTuple):
    """The values of OutputVectors, each `[out]`, or None if there is none."""

    magnitude: torch.Tensor | None
    bias: torch.Tensor | None
    base_bias: torch.Tensor | None

    def of_base(self, out: torch.Tensor, base_bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the replacement of the base's outputs, fp32 `[..., out]`, which contain this
        bias: m * (out - b) + b' of `reference.add_lora`."""
        if self.magnitude is None and self.base_bias is None:
            return out
        old = out.new_zeros(()) if base_bias is None else base_bias.float()
        scaled = out - old if self.magnitude is None else (out - old) * self.magnitude
        return scaled + (old if self.base_bias is None else self.base_bias.float())

    def of_added(self, products: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns the sum to add, from the products with A and B, fp32 `[..., out]`:
        scale * (m * products + c)."""
        if self.magnitude is not None:
            products = products * self.magnitude
        return scale * (products if self.bias is None else products + self.bias)


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Views into the arena, of its dtype, made when first used: `a` is `[a_rank, in]`, for an
    embedding `[vocab, a_rank]`; `b` is `[b_rank, out]`; `a_t` and `b_t` are transposed."""

    a: torch.Tensor
    a_t: torch.Tensor
    b: torch.Tensor
    b_t: torch.Tensor
    scale: float
    vectors: VectorValues | None = None

    def rows_of_a(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows of an embedding's A, `[len(ids), a_rank]` of its dtype. ids: int64 `[n]`."""
        return self.a.index_select(0, ids)


@dataclass(frozen=True, slots=True)
class Float8Weights:
    """The same of an adapter whose A and B are float8: each use converts the values to `dtype`,
    which loses nothing. They would take twice the arena's memory if they were kept."""

    a_values: torch.Tensor
    """`[a_rank, in]`, for an embedding `[vocab, a_rank]`."""
    b_values: torch.Tensor
    """`[b_rank, out]`."""
    dtype: torch.dtype
    scale: float
    vectors: VectorValues | None = None

    @property
    def a(self) -> torch.Tensor:
        """`a_values` in `dtype`, a copy; likewise the three below."""
        return self.a_values.to(self.dtype)

    @property
    def a_t(self) -> torch.Tensor:
        return self.a.t()

    @property
    def b(self) -> torch.Tensor:
        return self.b_values.to(self.dtype)

    @property
    def b_t(self) -> torch.Tensor:
        return self.b.t()

    def rows_of_a(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows of an embedding's A, `[len(ids), a_rank]` of `dtype`. ids: int64 `[n]`."""
        rows = self.a_values.view(torch.uint8).index_select(0, ids)
        return rows.view(self.a_values.dtype).to(self.dtype)


TargetWeights: TypeAlias = PlainWeights | Float8Weights


def vectors_at(arena: torch.Tensor, vectors: OutputVectors, size: int) -> VectorValues | None:
    """Returns views of a target's vectors, None if it has none. arena: [arena_bytes // itemsize];
    views: [size], float32 or, for the base's bias, of the arena's dtype.
    """
    if vectors == NO_VECTORS:
        return None
    return VectorValues(
        vector_at(arena, vectors.magnitude, size, torch.float32),
        vector_at(arena, vectors.bias, size, torch.float32),
        vector_at(arena, vectors.base_bias, size),
    )


def vector_at(
    arena: torch.Tensor, granule: int, size: int, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Returns a view [size] of `dtype`, or of the arena's dtype; None for an absent granule. arena:
    [arena_bytes // itemsize].
    """
    if granule == ABSENT:
        return None
    dtype = dtype or arena.dtype
    start = granule * GRANULE_BYTES
    return arena.view(torch.uint8)[start : start + size * dtype.itemsize].view(dtype)
