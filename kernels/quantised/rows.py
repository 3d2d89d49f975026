"""Rows of a weight as codes with scales, in which all checkpoint formats agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantised.formats import WeightFormat


@dataclass(frozen=True, eq=False, slots=True)
class QuantisedRows:
    """Rows of one weight, on their way from a file to the form that a backend computes with.

    format: The meaning of all below.
    codes: uint8 [N, in], one code in a byte.
    scales: [N, groups] of the format's `scale_dtype`.
    offsets: As scales; None if the format has none.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, in_features = self.codes.shape
        shape = (num_rows, self.format.num_groups(in_features))
        assert self.codes.dtype == torch.uint8
        assert (self.offsets is not None) == self.format.has_offsets
        for each in (self.scales, self.offsets):
            assert each is None or (each.shape, each.dtype) == (shape, self.format.scale_dtype)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> QuantisedRows:
        """Returns some rows, as indexing a tensor's first dimension does."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return QuantisedRows(self.format, self.codes[rows], self.scales[rows], offsets)

    def columns(self, start: int, end: int) -> QuantisedRows:
        """Returns the inputs [start, end) of all rows.

        Args:
            start: A multiple of the format's group size, if it has one.
            end: A multiple of that, too, or the number of inputs.
        """
        size, groups = self.format.group_size, slice(None)
        if size:
            assert start % size == 0, "a group is cut"
            assert end % size == 0 or end == self.codes.shape[1], "a group is cut"
            groups = slice(start // size, -(-end // size))
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return QuantisedRows(self.format, self.codes[:, start:end], self.scales[:, groups], offsets)

    @staticmethod
    def cat(parts: Sequence[QuantisedRows]) -> QuantisedRows:
        """Returns rows of one format below each other."""
        offsets = [each.offsets for each in parts if each.offsets is not None]
        return QuantisedRows(
            parts[0].format,
            torch.cat([each.codes for each in parts]),
            torch.cat([each.scales for each in parts]),
            torch.cat(offsets) if offsets else None,
        )

    def dequantise(self) -> Tensor:
        """Returns table[code] * scale + offset, computed in fp32, [N, in]."""
        in_features = self.codes.shape[1]
        table = self.format.codes.table_on(self.codes.device)
        # Not table[codes]: torch would make a copy of the indices in int64.
        values = table.index_select(0, self.codes.int().view(-1)).view(self.codes.shape)
        values *= self._spread(self.scales, in_features)
        if self.offsets is not None:
            values += self._spread(self.offsets, in_features)
        return values

    def _spread(self, groups: Tensor, in_features: int) -> Tensor:
        """Returns the number of each input's group, [N, in], or [N, 1] where all have one."""
        wide = groups.float()
        size = self.format.group_size
        return wide.repeat_interleave(size, dim=1)[:, :in_features] if size else wide
