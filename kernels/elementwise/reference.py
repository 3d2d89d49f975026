"""The definitions, in torch, with the rounding of transformers' modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_centred: bool = False) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich,
    2019), in fp32 up to the product with the weight, which is in the weight's dtype: x's, or fp32.

    weight: [size], or [N, size]: of each row of x, or of each of its first dimension, [N, K, size].
    `is_centred`: of x - mean(x), a LayerNorm (Ba et al., 2016) without bias.
    """
    if weight.dim() == 2 and x.dim() == 3:
        weight = weight[:, None]
    # One fp32 copy that is worked on in place: fresh memory costs more than the arithmetic.
    wide = x.to(torch.float32, copy=True)
    if is_centred:
        wide -= wide.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wide *= norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    rows: Tensor | None = None,
    *,
    delta_scale: float = 1.0,
    sum_scale: float = 1.0,
    is_centred: bool = False,
) -> Tensor:
    """hidden = sum_scale * round(hidden + round(delta_scale * delta)), rounded to their dtype;
    returns the norm of it, or, without a weight, `hidden` itself. `delta` may be overwritten.

    hidden, delta: [T, size]; weight: [size], or [T, size]. With `rows` (int64 [N]) only these are
    computed: returns [N, size], of weights [size] or [N, size], and `hidden` stays as it is.
    """
    if rows is not None:
        chosen = hidden.index_select(0, rows)
        hidden, delta = chosen, None if delta is None else delta.index_select(0, rows)
    if delta is not None:
        hidden += delta if delta_scale == 1.0 else delta.mul_(delta_scale)
        if sum_scale != 1.0:
            hidden *= sum_scale
    if weight is None:
        return hidden
    return rms_norm(hidden, weight, eps, is_centred=is_centred)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate), rounded, * up (Shazeer, 2020). gate, up: [T, size] -> [T, size]."""
    return F.silu(gate).mul_(up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gelu(gate), in its approximation by tanh (Hendrycks and Gimpel, 2016), rounded, * up.
    Shapes as of `swiglu`."""
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between
    -limit and limit, as GPT-OSS computes it; in fp32, rounded once. Shapes as of `swiglu`."""
    bounded = gate.float().clamp(max=limit)
    active = bounded * torch.sigmoid(alpha * bounded)
    return ((up.float().clamp(-limit, limit) + 1) * active).to(gate.dtype)


def bound_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns scale * logits, or, if there is a cap, cap * tanh(scale * logits / cap)."""
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
