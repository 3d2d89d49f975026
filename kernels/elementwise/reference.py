"""The definitions, in torch, with the rounding of transformers' modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich,
    2019), in fp32 up to the product with the weight, which is in x's dtype."""
    # One fp32 copy that is worked on in place: fresh memory costs more than the arithmetic.
    wide = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wide *= norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.to(x.dtype).mul_(weight)


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """hidden += delta, rounded to their dtype; returns the RMSNorm of it.

    hidden, delta: [T, size]; weight: [size]. With `rows` (int64 [N]) only these are computed:
    returns [N, size], and `hidden` stays as it is.
    """
    if rows is not None:
        chosen = hidden.index_select(0, rows)
        hidden, delta = chosen, None if delta is None else delta.index_select(0, rows)
    if delta is not None:
        hidden += delta
    return rms_norm(hidden, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate), rounded, * up (Shazeer, 2020). gate_up: [T, 2 * size], gate first ->
    [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
