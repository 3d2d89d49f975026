"""Weights in the order in which `src/linear.cpp` reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.host_memory import allocate_host

PANEL = 32
"""Outputs that lie together; as in `src/linear.h`."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedLinear:
    """One projection. Nothing of the tensors that it was packed from is kept.

    weights: [panels, in, PANEL] of float32, or [panels, ceil(in / 2), 2 * PANEL] of bfloat16, two
    neighbouring inputs of one output side by side; zero beyond the last input and output.
    bias: float32 [out_features].
    """

    weights: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int

    @staticmethod
    def pack(
        weight: Tensor,
        bias: Tensor | None = None,
        allocate: Callable[[int], Tensor] = allocate_host,
    ) -> PackedLinear:
        """weight: [out, in] of float32 or bfloat16, on the CPU; bias: [out].
        `allocate` gives zeroed bytes, uint8, on 64 bytes."""
        assert weight.dtype in (torch.float32, torch.bfloat16)
        out_features, in_features = weight.shape
        if weight.dtype == torch.bfloat16:
            # Padding copies even where there is nothing to pad.
            pairs = F.pad(weight, (0, 1)) if in_features % 2 else weight.contiguous()
            steps = pairs.view(torch.int32)  # [out, ceil(in / 2)]
        else:
            steps = weight
        num_panels, whole = -(-out_features // PANEL), out_features // PANEL
        packed = allocate(num_panels * PANEL * steps.shape[1] * 4).view(steps.dtype)
        packed = packed.view(num_panels, steps.shape[1], PANEL)
        inner, rest = steps.split([whole * PANEL, out_features - whole * PANEL])
        packed[:whole] = inner.unflatten(0, (whole, PANEL)).transpose(1, 2)
        packed[whole:, :, : len(rest)] = rest.t()
        return PackedLinear(
            packed.view(weight.dtype),
            None if bias is None else bias.float(),
            in_features,
            out_features,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)
