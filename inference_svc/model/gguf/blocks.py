"""GGUF's blocks of quantised weights, as rows of codes with scales.

The blocks are structs of ggml's ggml-common.h, and their values those of `dequantize_row_*` in its
ggml-quants.c: a number of half precision `d`, of some a smallest value `m`, then codes. The types
K have 256 weights in a block, whose groups have scales of 6 or 8 bits that `d` multiplies. Their
products are exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.file import TYPES
from kernels.quantised import Codes, QuantisedRows, WeightFormat

_BLOCK_OF = {each.name: each for each in TYPES.values()}


class Parts(NamedTuple):
    """Blocks taken apart: codes, uint8 [blocks, weights], scales and offsets [blocks, groups]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


class _BlockFormat(NamedTuple):
    format: WeightFormat
    parts: Callable[[Tensor], Parts]


def decode(blocks: Tensor, kind: str) -> QuantisedRows:
    """Returns rows of a weight.

    Args:
        blocks: uint8 [N, bytes of a row].
        kind: A key of `FORMATS`.

    Raises:
        UnsupportedModel: A scale is not finite.
    """
    form, parts = FORMATS[kind]
    num_rows = len(blocks)
    codes, scales, offsets = parts(blocks.reshape(-1, _BLOCK_OF[kind].num_bytes))
    for each in (scales, offsets):
        if each is not None and not each.isfinite().all():
            raise UnsupportedModel("weight has scales that are not finite: the file is broken")
    return QuantisedRows(
        form,
        codes.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if offsets is None else offsets.reshape(num_rows, -1),
    )


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Returns the number of half precision at this byte of each block, fp16 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Returns [blocks, runs, 2 * bytes] of [blocks, runs, bytes]: of each run the low halves of all
    bytes, then the high ones."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)


def _bits(packed: Tensor, num_bits: int) -> Tensor:
    """Returns [blocks, parts, bytes] of [blocks, bytes]: part i has the i-th lowest `num_bits` of
    each byte."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
    return (packed[:, None, :] >> shifts[None, :, None]) & ((1 << num_bits) - 1)


def _signed(codes: Tensor, offset: int) -> Tensor:
    """Returns the codes, uint8, less a number: as bytes of int8."""
    return (codes.view(torch.int8) - offset).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Parts:
    # The value of a code of INT4 is 8 less, as here.
    return Parts(_nibbles(blocks[:, None, 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, None, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """Returns codes whose fifth bits, of a weight each, lie before the others."""
    shifts = torch.arange(8, dtype=torch.uint8)
    high = (blocks[:, start : start + 4, None] >> shifts) & 1
    low = _nibbles(blocks[:, None, start + 4 :])
    return low.reshape(-1, 32) | high.reshape(-1, 32) << 4


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_signed(_five_bits(blocks, 2), 16), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_five_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].contiguous(), _halves(blocks, 0))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and offsets of the eight groups of Q4_K and Q5_K, fp32 [blocks, 8].

    Of 12 bytes the first four have six bits of the first four scales, the next four the same of the
    smallest values, and the last four the low halves of the other scales and smallest values, whose
    two highest bits are in the eight before.
    """
    scales, smallest, low = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((scales & 0x3F, low & 0xF | scales >> 2 & 0x30), dim=1)
    smallest = torch.cat((smallest & 0x3F, low >> 4 | smallest >> 2 & 0x30), dim=1)
    factor, smallest_factor = _halves(blocks, 0).float(), _halves(blocks, 2).float()
    return factor * scales, -(smallest_factor * smallest)


def _q4_k(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 16:].view(-1, 4, 32)), *_scales_of_k(blocks))


def _q5_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).reshape(-1, 8, 32)
    return Parts(low | _bits(blocks[:, 16:48], 1) << 4, *_scales_of_k(blocks))


def _q6_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = torch.stack((_bits(blocks[:, 128:160], 2), _bits(blocks[:, 160:192], 2)), dim=1)
    factors = blocks[:, 192:208].contiguous().view(torch.int8)
    return Parts(_signed(low | high << 4, 32), _halves(blocks, 208).float() * factors)


_HALF = "float16"
FORMATS: Mapping[str, _BlockFormat] = {
    "Q4_0": _BlockFormat(WeightFormat(Codes.INT4, 32, scales=_HALF), _q4_0),
    "Q4_1": _BlockFormat(WeightFormat(Codes.UINT4, 32, True, _HALF), _q4_1),
    "Q5_0": _BlockFormat(WeightFormat(Codes.INT8, 32, scales=_HALF), _q5_0),
    "Q5_1": _BlockFormat(WeightFormat(Codes.INT8, 32, True, _HALF), _q5_1),
    "Q8_0": _BlockFormat(WeightFormat(Codes.INT8, 32, scales=_HALF), _q8_0),
    "Q4_K": _BlockFormat(WeightFormat(Codes.UINT4, 32, True), _q4_k),
    "Q5_K": _BlockFormat(WeightFormat(Codes.INT8, 32, True), _q5_k),
    "Q6_K": _BlockFormat(WeightFormat(Codes.INT8, 16), _q6_k),
}
"""The quantised types, by their names."""
