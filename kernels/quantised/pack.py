"""Quantised weights in the order in which `src/quantised.cpp` reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.host_memory import allocate_host
from kernels.linear.pack import PANEL
from kernels.quantised.formats import Activations, Codes, WeightFormat
from kernels.quantised.quantise import quantise
from kernels.quantised.rows import QuantisedRows

BLOCK_CODES = 1 << 18
"""Codes that are packed or quantised at once: a block's copies are all that packing takes beside
the packed."""
_NAN = 0x7F
"""The magnitude of FP8's NaN."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedQuantised:
    """One projection whose weights have few bits, with the interface of `PackedLinear`.

    weights: uint8 [panels, groups, bytes]. A group has the scales of PANEL outputs, their offsets
        if the format has them, and [words, PANEL] words of codes: of 8 inputs if a code has 4 bits,
        of 2 if it has 8, or of 4 if activations are rounded to INT8. Zero beyond the last output.
    bias: float32 [out_features].
    table: float32, the value of each code.
    dtype: Of inputs and outputs: float32 or bfloat16.
    """

    weights: Tensor
    bias: Tensor | None
    table: Tensor
    in_features: int
    out_features: int
    dtype: torch.dtype
    format: WeightFormat

    @staticmethod
    def empty(
        out_features: int,
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        form: WeightFormat,
        allocate: Callable[[int], Tensor] = allocate_host,
    ) -> PackedQuantised:
        """Returns a projection whose weight is zero until its rows are put. `allocate` gives zeroed
        bytes, uint8, on 64 bytes."""
        assert dtype in (torch.float32, torch.bfloat16)
        assert in_features <= form.max_inputs
        # Groups of inputs in int8 are whole words.
        assert form.activations is Activations.EXACT or form.group_size % 4 == 0
        num_bytes = packed_bytes(out_features, in_features, form)
        num_panels = -(-out_features // PANEL)
        return PackedQuantised(
            allocate(num_bytes).view(num_panels, form.num_groups(in_features), -1),
            torch.zeros(out_features) if has_bias else None,
            form.codes.table,
            in_features,
            out_features,
            dtype,
            form,
        )

    @staticmethod
    def pack(
        rows: QuantisedRows,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor] = allocate_host,
    ) -> PackedQuantised:
        """Returns all rows of a weight, packed. bias: [out]. See `empty`."""
        packed = PackedQuantised.empty(
            *rows.codes.shape,
            has_bias=bias is not None,
            dtype=dtype,
            form=rows.format,
            allocate=allocate,
        )
        packed.put_rows(0, rows)
        if bias is not None:
            packed.put_bias(0, bias)
        return packed

    def put_rows(self, start: int, rows: QuantisedRows | Tensor) -> None:
        """Packs rows, on the CPU, as those from `start` on: of this format, or plain ones [N, in]
        of any float dtype, which are quantised."""
        block = max(1, BLOCK_CODES // (self.in_features * PANEL)) * PANEL
        while len(rows):
            size = PANEL - start % PANEL if start % PANEL else block
            some = rows[:size]
            if isinstance(some, Tensor):
                some = quantise(some, self.format)
            self._put_block(start, some)
            start, rows = start + len(some), rows[len(some) :]

    def _put_block(self, start: int, rows: QuantisedRows) -> None:
        """Packs rows that begin a panel, or are all in one."""
        assert rows.format == self.format
        assert rows.codes.shape[1] == self.in_features
        scales, offsets, codes = self._views()
        made = self._words(rows.codes)
        word_dtype = made.dtype
        codes = codes.flatten(3).view(word_dtype)  # [panels, groups, words, PANEL]
        panel, lane = divmod(start, PANEL)
        if lane or len(rows) < PANEL:
            parts = [(0, panel, lane, len(rows))]
        else:
            whole = len(rows) // PANEL
            panels = slice(panel, panel + whole)
            first = slice(0, whole * PANEL)
            codes[panels] = made[first].unflatten(0, (whole, PANEL)).permute(0, 2, 3, 1)
            scales[panels] = self._scales(rows[first]).unflatten(0, (whole, PANEL)).mT
            if offsets is not None and rows.offsets is not None:
                offsets[panels] = rows.offsets[first].unflatten(0, (whole, PANEL)).mT
            parts = [(first.stop, panel + whole, 0, len(rows) - first.stop)]
        for done, panel, lane, count in parts:
            part, lanes = slice(done, done + count), slice(lane, lane + count)
            if count:
                codes[panel, :, :, lanes] = made[part].permute(1, 2, 0)
                scales[panel, :, lanes] = self._scales(rows[part]).t()
                if offsets is not None and rows.offsets is not None:
                    offsets[panel, :, lanes] = rows.offsets[part].t()

    def _views(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the weights' scales and offsets, [panels, groups, PANEL], and codes, uint8
        [panels, groups, words, PANEL, bytes of a word]."""
        dtype = self.format.scale_dtype
        size = PANEL * dtype.itemsize
        scales = self.weights[:, :, :size].view(dtype)
        offsets = None
        if self.format.has_offsets:
            offsets = self.weights[:, :, size : 2 * size].view(dtype)
        header = (1 + self.format.has_offsets) * size
        codes = self.weights[:, :, header:]
        return scales, offsets, codes.unflatten(2, (-1, PANEL, word_shape(self.format)[1]))

    def _words(self, codes: Tensor) -> Tensor:
        """Returns codes [N, in] as words [N, groups, words], each an integer of its bytes."""
        size = self.group_size
        num_groups = self.format.num_groups(self.in_features)
        span, word_bytes = word_shape(self.format)
        if padding := num_groups * size - self.in_features:
            codes = F.pad(codes, (0, padding))
        groups = codes.unflatten(1, (num_groups, size))
        if size % span:
            groups = F.pad(groups, (0, -size % span))
        if self.format.codes.num_bits == 4:
            return _nibbles(groups.contiguous().view(torch.int64))
        if self.format.activations is Activations.INT8:
            groups = groups ^ 0x80
        return groups.contiguous().view({2: torch.int16, 4: torch.int32}[word_bytes])

    def _scales(self, rows: QuantisedRows) -> Tensor:
        """Returns rows' scales. Where a code of a group is NaN, its scale is: kernels know no such
        code, and all products with the group are NaN in either way."""
        if self.format.codes is not Codes.FP8:
            return rows.scales
        is_nan = (rows.codes & 0x7F) == _NAN
        if not is_nan.any():
            return rows.scales
        num_groups = self.format.num_groups(self.in_features)
        padded = F.pad(is_nan, (0, num_groups * self.group_size - self.in_features))
        of_groups = padded.view(len(rows), num_groups, -1).any(dim=2)
        return rows.scales.masked_fill(of_groups, torch.nan)

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N], rounded to `dtype`, as those from `start` on."""
        assert self.bias is not None
        self.bias[start : start + len(values)] = values.to(self.dtype)

    def quantised_rows(self, start: int, end: int) -> QuantisedRows:
        """Returns rows [start, end) as they were put, a copy; see `_scales` for one exception."""
        first, last = start // PANEL, -(-end // PANEL)
        scales, offsets, codes = (
            None if each is None else each[first:last] for each in self._views()
        )
        assert scales is not None
        assert codes is not None
        rows = slice(start - first * PANEL, end - first * PANEL)
        words = codes.permute(0, 3, 1, 2, 4).flatten(0, 1)[rows]  # [N, groups, words, bytes]
        return QuantisedRows(
            self.format,
            self._codes(words)[:, : self.in_features].contiguous(),
            scales.transpose(1, 2).flatten(0, 1)[rows].clone(),
            None if offsets is None else offsets.transpose(1, 2).flatten(0, 1)[rows].clone(),
        )

    def _codes(self, words: Tensor) -> Tensor:
        """Returns the codes of words, [N, padded in]: undoes `_words`."""
        if self.format.codes.num_bits == 4:
            both = words.unflatten(3, (2, 2)).transpose(3, 4)  # [..., words, pair, h]
            codes = torch.stack((both & 15, both >> 4), dim=4)
        else:
            codes = words ^ 0x80 if self.format.activations is Activations.INT8 else words
        return codes.flatten(2)[:, :, : self.group_size].flatten(1)

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight, dequantised and rounded to `dtype`,
        [end - start, in], a copy."""
        return self.quantised_rows(start, end).dequantise().to(self.dtype)

    @property
    def group_size(self) -> int:
        """The inputs of a scale, with padding."""
        return self.format.group_size or _padded(self.in_features)

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _nibbles(inputs: Tensor) -> Tensor:
    """Returns eight codes in the bytes of an int64 as a word, int32: input 2 * i + h has bits
    [16 * h + 4 * i, ... + 4)."""
    pairs = inputs | inputs >> 12  # byte 2 * i is where byte 2 * i + 2 of the next pair was
    even = pairs & 0xFF | pairs >> 24 & 0xFF00
    odd = pairs >> 8 & 0xFF | pairs >> 32 & 0xFF00
    return (even | odd << 16).to(torch.int32)


def packed_bytes(out_features: int, in_features: int, form: WeightFormat) -> int:
    """Returns the bytes of a packed weight, without its bias."""
    span, word_bytes = word_shape(form)
    words = -(-(form.group_size or _padded(in_features)) // span)
    scale_bytes = (1 + form.has_offsets) * form.scale_dtype.itemsize
    lane_bytes = form.num_groups(in_features) * (scale_bytes + words * word_bytes)
    return -(-out_features // PANEL) * PANEL * lane_bytes


def word_shape(form: WeightFormat) -> tuple[int, int]:
    """Returns the inputs of a word, and its bytes."""
    if form.codes.num_bits == 4:
        return 8, 4
    return (4, 4) if form.activations is Activations.INT8 else (2, 2)


def _padded(in_features: int) -> int:
    """Returns the inputs of a row to whole words of each kind."""
    return -(-in_features // 8) * 8
