"""The decoder's parts, with the numerics of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.rope import Rope


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


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Computes weight * x / sqrt(mean(x^2) + eps) over the last dimension, in fp32 up to the
    product with the weight, which is in x's dtype."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        # One fp32 copy that is worked on in place: fresh memory costs more than the arithmetic.
        wide = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        wide *= norm.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return wide.to(x.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One step's angles: `cos` and `sin` [T, 1, head_dim] in the model's dtype, with the sign of
    the rotation already in `sin`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """heads: [T, num_heads, head_dim]; element i is rotated with element i + head_dim / 2."""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return (heads * self.cos).addcmul_(swapped, self.sin)


class RotaryEmbedding:
    """Computes angles from positions, once per step instead of storing them for every position of
    a long context; each depends on its own position alone."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = rope.inverse_frequencies(head_dim).to(device)
        self._scaling = rope.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]."""
        angles = positions[:, None, None].float() * self._inverse_frequencies
        cos = (angles.cos() * self._scaling).to(dtype)
        sin = (angles.sin() * self._scaling).to(dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up. gate_up: [T, 2 * intermediate_size] -> [T, intermediate_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
