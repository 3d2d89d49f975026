"""The definitions, in torch, with the rounding of transformers' modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise.addend import Addend


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, is_centred: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich,
    2019).

    It computes in fp32 up to the product with the weight, which is in the weight's dtype.

    Args:
        x: [..., size].
        weight: [size], or [N, size] for each row of x or each of its first dimension, [N, K, size].
            Of x's dtype or float32.
        eps: Added to the mean square.
        is_centred: Norm x - mean(x), a LayerNorm (Ba et al., 2016).
        bias: Added to the product, float32, shaped as weights are; the weight is float32, too.
            None: none.

    Returns:
        [..., size] of x's dtype.
    """
    if weight.dim() == 2 and x.dim() == 3:
        weight = weight[:, None]
    if is_centred and bias is not None and weight.dim() == bias.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)  # the same in one pass
    # One fp32 copy that is worked on in place: fresh memory costs more than the arithmetic.
    wide = x.to(torch.float32, copy=True)
    if is_centred:
        wide -= wide.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wide *= norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    wide = wide.to(weight.dtype).mul_(weight)
    return (wide if bias is None else wide.add_(bias)).to(x.dtype)


def norm_by_sum(x: Tensor, weight: Tensor, eps: float, sums: Tensor, count: int) -> Tensor:
    """Returns weight * x / sqrt(sum / count + eps): `rms_norm` of a part of the elements, by the
    sum of squares of all. It rounds as that does.

    Args:
        x: [T, size], some of the elements.
        weight: [size], or [T, size] for each row. Of x's dtype or float32.
        eps: Added to the mean square.
        sums: Squares of all elements, float32 [T].
        count: Number of all elements.

    Returns:
        [T, size] of x's dtype.
    """
    scale = (sums / count + eps).rsqrt_()
    return (x.float() * scale[:, None]).to(weight.dtype).mul_(weight).to(x.dtype)


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
    bias: Tensor | None = None,
    addend: Addend | None = None,
) -> Tensor:
    """hidden = sum_scale * round(hidden + round(delta_scale * delta)), rounded to their dtype.

    Args:
        hidden: [T, size]. Gets the sum, except with `rows`.
        delta: [T, size]; may be overwritten. None: nothing is added.
        weight: [size], or [T, size]; with `rows`, [size] or [N, size]. None: no norm.
        eps: As in `rms_norm`.
        rows: Rows to compute, int64 [N]. None: all.
        delta_scale: Factor of `delta`.
        sum_scale: Factor of the sum.
        is_centred: As in `rms_norm`.
        bias: As in `rms_norm`.
        addend: Adapters' addition to `delta` before anything else, [T, size]; without `delta`, to
            what is normed, and `hidden` stays. None: none.

    Returns:
        The norm of the sum, or the sum itself without a weight: [T, size], or [N, size] with
        `rows`.
    """
    if rows is not None:
        chosen = hidden.index_select(0, rows)
        hidden, delta = chosen, None if delta is None else delta.index_select(0, rows)
        addend = None if addend is None else addend.of_rows(rows)
    if addend is not None:
        if delta is None:
            hidden = addend.added_to(hidden)
        else:
            delta = addend.added_to(delta)
    if delta is not None:
        hidden += delta if delta_scale == 1.0 else delta.mul_(delta_scale)
        if sum_scale != 1.0:
            hidden *= sum_scale
    if weight is None:
        return hidden
    return rms_norm(hidden, weight, eps, is_centred=is_centred, bias=bias)


def swiglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns silu(gate), rounded, * up (Shazeer, 2020). gate, up: [T, size] -> [T, size], of one
    dtype. Adapters' addition to both, [T, 2 * size], comes first.
    """
    gate, up = _with_addend(gate, up, addend)
    return F.silu(gate).mul_(up)


def geglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns gelu(gate), approximated by tanh (Hendrycks and Gimpel, 2016) and rounded, * up.
    gate, up: [T, size] -> [T, size], of one dtype; addend as in `swiglu`.
    """
    gate, up = _with_addend(gate, up, addend)
    return F.gelu(gate, approximate="tanh").mul_(up)


def exact_geglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns gelu(gate), without an approximation and rounded, * up. gate, up: [T, size] -> [T,
    size], of one dtype; addend as in `swiglu`.
    """
    gate, up = _with_addend(gate, up, addend)
    return F.gelu(gate).mul_(up)


def _with_addend(gate: Tensor, up: Tensor, addend: Addend | None) -> tuple[Tensor, Tensor]:
    if addend is None:
        return gate, up
    gate, up = addend.added_to(torch.cat((gate, up), dim=1)).chunk(2, dim=1)
    return gate, up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), as GPT-OSS computes it, in fp32 and rounded
    once. gate is at most `limit`, and up between -limit and limit. gate, up: [T, size] -> [T,
    size], of one dtype.
    """
    bounded = gate.float().clamp(max=limit)
    active = bounded * torch.sigmoid(alpha * bounded)
    return ((up.float().clamp(-limit, limit) + 1) * active).to(gate.dtype)


def bound_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns scale * logits, or, with a cap, cap * tanh(scale * logits / cap).
    logits: [N, size], a float dtype -> the same.
    """
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
