"""A weight in few bits as it lies in memory for torch and Triton: row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantised.formats import WeightFormat
from kernels.quantised.quantise import quantise
from kernels.quantised.rows import QuantisedRows

BLOCK_ELEMENTS = 1 << 20
"""Elements of a weight that are quantised or dequantised at once: the copies of that many are all
the memory that it takes."""
COPY_BYTES = 24
"""The bytes that quantising or dequantising an element takes meanwhile."""


@dataclass(frozen=True, eq=False, slots=True)
class QuantisedWeight:
    """A weight [out, in].

    codes: uint8 [out, ceil(in * bits / 8)]; of two codes in a byte the first is the lower half.
    scales: [out, groups] of the format's dtype of scales.
    offsets: As scales; None if the format has none.
    """

    format: WeightFormat
    in_features: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @staticmethod
    def empty(
        form: WeightFormat, out_features: int, in_features: int, device: torch.device
    ) -> QuantisedWeight:
        """Returns a weight whose rows are undefined until they are put."""
        code_bytes = -(-in_features * form.codes.num_bits // 8)
        codes = torch.empty(out_features, code_bytes, dtype=torch.uint8, device=device)
        groups = out_features, form.num_groups(in_features)
        scales = torch.empty(groups, dtype=form.scale_dtype, device=device)
        offsets = torch.empty_like(scales) if form.has_offsets else None
        return QuantisedWeight(form, in_features, codes, scales, offsets)

    def put_rows(self, start: int, rows: QuantisedRows | Tensor) -> None:
        """Takes rows [N, in] as the rows from `start` on: of the weight's format, or plain ones of
        any float dtype, which are quantised."""
        if isinstance(rows, Tensor):
            for first, end in self._blocks(len(rows)):
                own = rows[first:end].to(self.codes.device)
                self.put_rows(start + first, quantise(own, self.format))
            return
        assert rows.format == self.format, f"{rows.format}, not {self.format}"
        end = start + len(rows)
        self.codes[start:end].copy_(self._packed(rows.codes))
        self.scales[start:end].copy_(rows.scales)
        if self.offsets is not None and rows.offsets is not None:
            self.offsets[start:end].copy_(rows.offsets)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.format.codes.num_bits == 8:
            return codes
        padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        return padded[:, ::2] | (padded[:, 1::2] << 4)

    def rows(self, start: int, end: int) -> QuantisedRows:
        """Returns rows [start, end)."""
        codes = self.codes[start:end]
        if self.format.codes.num_bits == 4:
            both = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
            codes = both[:, : self.in_features]
        offsets = None if self.offsets is None else self.offsets[start:end]
        return QuantisedRows(self.format, codes, self.scales[start:end], offsets)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields all rows block by block, dequantised, fp32 [N, in], with the first of each."""
        for start, end in self._blocks(len(self.codes)):
            yield start, self.rows(start, end).dequantise()

    def _blocks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        step = max(1, BLOCK_ELEMENTS // self.in_features)
        for start in range(0, num_rows, step):
            yield start, min(start + step, num_rows)

    @property
    def num_bytes(self) -> int:
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offsets
