"""Matrices in an arena, one after the other; beyond them it is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.lora import GRANULE_BYTES

FIRST_GRANULE = 3
"""Those before belong to nobody."""


def to_float8(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the values as E4M3 of the whole range, and the factor that they have lost."""
    scale = 2.0 ** math.ceil(math.log2(values.abs().max().item() / 448))
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


class Packing:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._granule = FIRST_GRANULE
        self._parts: list[tuple[int, torch.Tensor]] = []

    def place(self, matrix: torch.Tensor) -> int:
        """Returns the granule at which the matrix starts. Float8 stays float8."""
        if matrix.dtype == torch.float8_e4m3fn:
            return self.place_as_it_is(matrix)
        return self.place_as_it_is(matrix.to(self.dtype))

    def place_as_it_is(self, values: torch.Tensor) -> int:
        """Does what `place` does, for values of a dtype of their own."""
        start = self._granule
        padded = values.flatten()
        missing = -padded.nbytes % self.dtype.itemsize // padded.itemsize
        if missing:
            padded = torch.cat((padded, padded.new_zeros(missing)))
        self._parts.append((start, padded.view(self.dtype)))
        self._granule += math.ceil(values.nbytes / GRANULE_BYTES)
        return start

    def place_experts(
        self, matrices: Sequence[torch.Tensor | None], scales: Sequence[float]
    ) -> int:
        """Returns the granule of a segment: an index, and each matrix, once."""
        start = self._granule
        self._granule += math.ceil(16 * len(matrices) / GRANULE_BYTES)
        index = torch.zeros(len(matrices), 4, dtype=torch.int32)
        places: dict[int, int] = {}
        for row, matrix, scale in zip(index, matrices, scales, strict=True):
            row[2] = torch.tensor(scale).view(torch.int32)
            if matrix is not None:
                if id(matrix) not in places:
                    places[id(matrix)] = self.place(matrix) - start
                row[0], row[1] = places[id(matrix)], len(matrix)
        self._parts.append((start, index.flatten().view(self.dtype)))
        return start

    def arena(self) -> torch.Tensor:
        size = self._granule * GRANULE_BYTES // self.dtype.itemsize
        arena = torch.full((size,), float("nan"), dtype=self.dtype)
        for start, values in self._parts:
            offset = start * GRANULE_BYTES // self.dtype.itemsize
            arena[offset : offset + values.numel()] = values.flatten()
        return arena
