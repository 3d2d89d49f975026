"""The decoder's parts that hold something: weights of projections, frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.rope import Rope
from kernels.attention import rotary_angles


@dataclass(frozen=True, slots=True)
class Linear:
    """Computes x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)


class Rotation(NamedTuple):
    """One step's angles [T, 1, rotary size]; see `kernels.attention.reference.rotary_angles`. None:
    nothing is rotated."""

    cos: Tensor | None
    sin: Tensor | None


class RotaryEmbedding:
    """Computes angles from positions, once per step instead of storing them for every position of
    a long context; each depends on its own position alone."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = rope.inverse_frequencies(head_dim).to(device)
        self._scaling = rope.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]."""
        return Rotation(*rotary_angles(positions, self._inverse_frequencies, self._scaling, dtype))
