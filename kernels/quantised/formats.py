"""The formats of quantised weights: the meaning of codes, and the shape of their scales.

A weight is `table[code] * scale + offset`, with one scale, and offset if the format has them, for
each run of `group_size` inputs of an output. All published formats are of this form:

INT4, UINT4  compressed-tensors, AWQ, GPTQ (offset = -zero * scale), GGUF's Q4_0, Q4_1 and Q4_K
NF4          bitsandbytes; the table is Appendix E of https://arxiv.org/abs/2305.14314
FP4          MXFP4, E2M1: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
INT8         bitsandbytes, compressed-tensors, GGUF's Q8_0, and Q5 and Q6, whose codes fit
FP8          E4M3 without infinities: https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK_INPUTS = 64
"""Codes of four bits of so many inputs lie in one block."""
SMALLEST_GROUP = 16
"""Tensor cores multiply so many inputs at once."""
CHUNK_INPUTS = 128
"""Native kernels sum products of up to so many inputs of one group, a chunk; as in
`src/quantised.cpp`."""
MAX_CHUNKS = 1 << 14
"""The most chunks of a row, for each of which they keep a sum of inputs; as in
`src/quantised_inputs.h`."""


class Codes(enum.Enum):
    """The meaning of a weight's codes, before they are scaled."""

    INT4 = "int4"
    UINT4 = "uint4"
    NF4 = "nf4"
    FP4 = "fp4"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def num_bits(self) -> int:
        return 8 if self in (Codes.INT8, Codes.FP8) else 4

    @property
    def table(self) -> Tensor:
        """The value of each code, float32 [2 ** num_bits]. A code of INT4 is 8 more than its value,
        a code of INT8 or FP8 the byte of its value."""
        return _table(self)

    def table_on(self, device: torch.device) -> Tensor:
        """Returns `table`, float32 [2 ** num_bits], on a device: always the same tensor."""
        return _table_on(self, device)


class Activations(enum.Enum):
    """The inputs of products: as they are, or rounded to INT8 with a scale for each token."""

    EXACT = "exact"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The form of a weight. `group_size` is 0 for one scale for all inputs of an output. `scales`
    is the dtype of scales and offsets by torch's name."""

    codes: Codes
    group_size: int = 0
    has_offsets: bool = False
    scales: str = "float32"
    activations: Activations = Activations.EXACT

    def __post_init__(self) -> None:
        assert self.group_size >= 0
        assert self.activations is Activations.EXACT or self.codes is Codes.INT8

    @property
    def scale_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.scales)
        return dtype

    @property
    def has_odd_groups(self) -> bool:
        """Whether a group is neither an output's all inputs nor 16, 32, 64 ... of them: tensor
        cores do not multiply by such groups."""
        size = self.group_size
        return size != 0 and (size < SMALLEST_GROUP or size & (size - 1) != 0)

    @property
    def max_inputs(self) -> int:
        """The most inputs that a product may have, whatever computes it."""
        size = self.group_size or CHUNK_INPUTS
        return MAX_CHUNKS // -(-size // CHUNK_INPUTS) * size

    def num_groups(self, in_features: int) -> int:
        """Returns the number of scales of an output."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def code_bytes(self, in_features: int) -> int:
        """Returns the bytes of an output's codes; of four bits, there are two in a byte, in whole
        blocks."""
        if self.codes.num_bits == 8:
            return in_features
        return -(-in_features // BLOCK_INPUTS) * (BLOCK_INPUTS // 2)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Returns the bytes of a weight."""
        scale_bytes = self.num_groups(in_features) * self.scale_dtype.itemsize
        row_bytes = self.code_bytes(in_features) + (1 + self.has_offsets) * scale_bytes
        return out_features * row_bytes

    def __str__(self) -> str:
        """Returns such as "int4, groups of 128"."""
        groups = f"groups of {self.group_size}" if self.group_size else "per output"
        inputs = "" if self.activations is Activations.EXACT else ", int8 inputs"
        return f"{self.codes.value}, {groups}{inputs}"


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _table(codes: Codes) -> Tensor:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    if codes is Codes.INT8:
        return bytes_.view(torch.int8).float()
    if codes is Codes.FP8:
        return bytes_.view(torch.float8_e4m3fn).float()
    if codes is Codes.NF4:
        return torch.tensor(_NF4)
    if codes is Codes.FP4:
        return torch.tensor((*_FP4, *(-each for each in _FP4)))
    first = -8.0 if codes is Codes.INT4 else 0.0
    return torch.arange(16, dtype=torch.float32) + first


@cache
def _table_on(codes: Codes, device: torch.device) -> Tensor:
    return _table(codes).to(device)
