"""A weight in few bits as it lies in memory for torch and Triton.

Rows of codes are contiguous. Codes of four bits lie in blocks of 64 inputs; a block has four
planes of 16 neighbours, and eight words of 32 bits. Word t has the inputs 2 t and 2 t + 1 of each
plane: so Triton's kernels make numbers of both at once, and tensor cores multiply a plane as it is.
Padding is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kernels.quantised.formats import BLOCK_INPUTS, Codes, WeightFormat
from kernels.quantised.quantise import quantise
from kernels.quantised.rows import QuantisedRows

BLOCK_ELEMENTS = 1 << 20
"""Elements of a weight that are quantised or dequantised at once: the copies of that many are all
the memory that it takes."""
COPY_BYTES = 24
"""The bytes that quantising or dequantising an element takes meanwhile."""
PLANES, WORDS, BLOCK_BYTES = 4, 8, BLOCK_INPUTS // 2
_IN_HALVES, _NEIGHBOURS = (0, 4, 1, 5, 2, 6, 3, 7), (0, 1, 2, 3, 4, 5, 6, 7)
"""The place in a word, in units of four bits, of the codes (plane 0, side 0), (plane 0, side 1),
(plane 1, side 0) and so on. A plane's two codes lie in the same bits of both halves, or next to
each other where they choose bytes of a table."""


@dataclass(frozen=True, eq=False, slots=True)
class QuantisedWeight:
    """A weight [out, in].

    codes: uint8 [out, bytes]: see above, and `WeightFormat.code_bytes`.
    scales: [groups, out] of the format's dtype of scales: programs read many outputs' of a group.
    offsets: As scales; None if the format has none.
    table: The values of codes, fp32 [2 ** bits]; shared by all weights of a device.
    """

    format: WeightFormat
    in_features: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    table: Tensor

    @staticmethod
    def empty(
        form: WeightFormat, out_features: int, in_features: int, device: torch.device
    ) -> QuantisedWeight:
        """Returns a weight whose rows are undefined until they are put."""
        shape = out_features, form.code_bytes(in_features)
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        groups = form.num_groups(in_features), out_features
        scales = torch.empty(groups, dtype=form.scale_dtype, device=device)
        offsets = torch.empty_like(scales) if form.has_offsets else None
        table = form.codes.table_on(device)
        return QuantisedWeight(form, in_features, codes, scales, offsets, table)

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
        self.scales[:, start:end].copy_(rows.scales.T)
        if self.offsets is not None and rows.offsets is not None:
            self.offsets[:, start:end].copy_(rows.offsets.T)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.format.codes.num_bits == 8:
            return codes
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % BLOCK_INPUTS))
        pairs = padded.view(len(codes), -1, PLANES, WORDS, 2)
        words = torch.zeros(*pairs.shape[:2], WORDS, dtype=torch.int32, device=codes.device)
        for (plane, side), place in self._places():
            words |= pairs[:, :, plane, :, side].int() << (4 * place)
        return words.flatten(1).view(torch.uint8)

    def _unpacked(self, codes: Tensor) -> Tensor:
        words = codes.view(torch.int32).view(len(codes), -1, WORDS)
        shape = *words.shape[:2], PLANES, WORDS, 2
        pairs = torch.empty(shape, dtype=torch.uint8, device=codes.device)
        for (plane, side), place in self._places():
            pairs[:, :, plane, :, side] = (words >> (4 * place)) & 15
        return pairs.flatten(1)[:, : self.in_features]

    def _places(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yields the plane and side of each code of a word, with its place in the word."""
        of_codes = _NEIGHBOURS if self.format.codes is Codes.NF4 else _IN_HALVES
        return zip(product(range(PLANES), range(2)), of_codes, strict=True)

    def rows(self, start: int, end: int) -> QuantisedRows:
        """Returns rows [start, end)."""
        codes = self.codes[start:end]
        if self.format.codes.num_bits == 4:
            codes = self._unpacked(codes)
        offsets = None if self.offsets is None else self.offsets[:, start:end].T
        return QuantisedRows(self.format, codes, self.scales[:, start:end].T, offsets)

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
