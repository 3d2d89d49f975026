"""Operations of the decoder between its projections: norms, activations, gathers.

The functions below run `reference` on CPUs and `triton_ops` on CUDA.

addend          adapters' addition to a projection, for the kernel that reads both
native          the operations in C++, for programs: each builds its arguments at fixed addresses
reference       the definitions, in torch, with transformers' rounding
triton_kernels  the Triton kernels: each is one pass over its rows
triton_ops      their launches
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.elementwise import reference
from kernels.elementwise.addend import Addend
from kernels.elementwise.native import (
    add_rows_op,
    clamped_swiglu_op,
    exact_geglu_op,
    gather_op,
    geglu_op,
    gelu_op,
    gelu_tanh_op,
    norm_by_sum_op,
    quick_gelu_op,
    rms_norm_op,
    scale_rows_op,
    silu_op,
    sum_squares_op,
    swiglu_op,
)
from kernels.elementwise.reference import bound_logits, norm_by_sum

__all__ = [
    "NormWeight",
    "add_rms_norm",
    "add_rows_op",
    "bound_logits",
    "clamped_swiglu",
    "clamped_swiglu_op",
    "exact_geglu",
    "exact_geglu_op",
    "gather_op",
    "geglu",
    "geglu_op",
    "gelu_op",
    "gelu_tanh_op",
    "norm_by_sum",
    "norm_by_sum_op",
    "quick_gelu_op",
    "rms_norm",
    "rms_norm_op",
    "scale_rows_op",
    "silu_op",
    "sum_squares_op",
    "swiglu",
    "swiglu_op",
]


class NormWeight(NamedTuple):
    """A norm over the last dimension; see `reference.rms_norm`. `offset` is added to the
    checkpoint's values in `weight`, [size]. `bias`, fp32, is beside a weight in fp32."""

    weight: Tensor
    eps: float
    is_centred: bool = False
    offset: float = 0.0
    bias: Tensor | None = None


def rms_norm(x: Tensor, norm: NormWeight, addend: Addend | None = None) -> Tensor:
    """Norms the last dimension; see `reference.rms_norm`.

    Args:
        x: [..., size].
        norm: Weight [size] or [N, size], and how to norm.
        addend: Adapters' addition to x [T, size] before the norm. None: none.

    Returns:
        [..., size] of x's dtype.
    """
    if uses_triton(x):
        from kernels.elementwise import triton_ops

        rows = x.view(-1, x.shape[-1])
        normed = triton_ops.add_rms_norm(
            rows,
            None,
            norm.weight,
            norm.eps,
            is_centred=norm.is_centred,
            bias=norm.bias,
            addend=addend,
        )
        return normed.view_as(x)
    x = x if addend is None else addend.added_to(x)
    weight, eps, is_centred, _, bias = norm
    return reference.rms_norm(x, weight, eps, is_centred=is_centred, bias=bias)


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    norm: NormWeight | None,
    rows: Tensor | None = None,
    delta_scale: float = 1.0,
    sum_scale: float = 1.0,
    addend: Addend | None = None,
) -> Tensor:
    """Adds `delta` to `hidden` and norms the sum; see `reference.add_rms_norm`.

    Args:
        hidden: [T, size]. Gets the sum, except with `rows`.
        delta: [T, size] of hidden's dtype; may be overwritten. None: nothing is added.
        norm: The norm. None: return the sum.
        rows: Rows to compute, int64 [N]. None: all.
        delta_scale: Factor of `delta`.
        sum_scale: Factor of the sum.
        addend: Adapters' addition to `delta`, [T, size]. None: none.

    Returns:
        [T, size], or [N, size] with `rows`, of hidden's dtype.
    """
    weight, eps, is_centred, _, bias = norm or (None, 0.0, False, 0.0, None)
    if uses_triton(hidden):
        from kernels.elementwise import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.add_rms_norm(
            hidden,
            delta,
            weight,
            eps,
            rows,
            delta_scale=delta_scale,
            sum_scale=sum_scale,
            is_centred=is_centred,
            bias=bias,
            addend=addend,
        )
    return reference.add_rms_norm(
        hidden,
        delta,
        weight,
        eps,
        rows,
        delta_scale=delta_scale,
        sum_scale=sum_scale,
        is_centred=is_centred,
        bias=bias,
        addend=addend,
    )


def swiglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns silu(gate) * up; see `reference.swiglu`.

    Args:
        gate: [T, size]. Rows have unit stride and may be apart.
        up: As gate.
        addend: Adapters' addition to both, [T, 2 * size], the gate's first. None: none.

    Returns:
        [T, size] of gate's dtype.
    """
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.swiglu(gate, up, addend)
    return reference.swiglu(gate, up, addend)


def geglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns gelu(gate) * up; see `reference.geglu`.

    Args:
        gate: [T, size]. Rows have unit stride and may be apart.
        up: As gate.
        addend: Adapters' addition to both, [T, 2 * size], the gate's first. None: none.

    Returns:
        [T, size] of gate's dtype.
    """
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.geglu(gate, up, addend)
    return reference.geglu(gate, up, addend)


def exact_geglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Returns gelu(gate) * up, without an approximation; see `reference.exact_geglu`.

    Args:
        gate: [T, size]. Rows have unit stride and may be apart.
        up: As gate.
        addend: Adapters' addition to both, [T, 2 * size], the gate's first. None: none.

    Returns:
        [T, size] of gate's dtype.
    """
    assert not uses_triton(gate), "backends with a device refuse models with this activation"
    return reference.exact_geglu(gate, up, addend)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), with clamped gate and up; see
    `reference.clamped_swiglu`.

    Args:
        gate: [T, size]. Rows have unit stride and may be apart.
        up: As gate.
        alpha: Slope of the sigmoid.
        limit: Largest gate, and largest absolute value of up.

    Returns:
        [T, size] of gate's dtype.
    """
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.clamped_swiglu(gate, up, alpha, limit)
    return reference.clamped_swiglu(gate, up, alpha, limit)
