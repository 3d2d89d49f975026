"""Weights in the order in which `src/linear.cpp` reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.host_memory import allocate_host

PANEL = 32
"""Outputs that lie together; as in `src/linear.h`."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedLinear:
    """One projection. Nothing of the tensors that it was packed from is kept.

    weights: [panels, in, PANEL] of float32, or [panels, ceil(in / 2), PANEL, 2] of bfloat16 with
    two neighbouring inputs side by side; zero beyond the last input and output. bias: float32
    [out_features].
    """

    weights: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight: [out, in] of float32 or bfloat16, on the CPU; bias: [out]."""
        assert weight.dtype in (torch.float32, torch.bfloat16)
        out_features, in_features = weight.shape
        step = 2 if weight.dtype == torch.bfloat16 else 1
        num_panels, num_steps = -(-out_features // PANEL), -(-in_features // step)
        shape = (num_panels, num_steps, PANEL, step)
        packed = allocate_host(math.prod(shape) * weight.itemsize).view(weight.dtype).view(shape)
        for panel, rows in enumerate(weight.split(PANEL)):
            whole = in_features // step
            # [rows, steps, step] -> [steps, rows, step]
            steps = rows[:, : whole * step].unflatten(1, (whole, step)).transpose(0, 1)
            packed[panel, :whole, : len(rows)] = steps
            if whole < num_steps:
                packed[panel, whole, : len(rows), 0] = rows[:, -1]
        return PackedLinear(
            packed if step == 2 else packed.squeeze(-1),
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
