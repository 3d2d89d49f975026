"""What the decoder computes between its projections: norms, activations, gathers.

The functions below run `reference` on CPUs and `triton_ops` on CUDA.

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
from kernels.elementwise.native import (
    clamped_swiglu_op,
    gather_op,
    geglu_op,
    rms_norm_op,
    scale_rows_op,
    swiglu_op,
)
from kernels.elementwise.reference import bound_logits

__all__ = [
    "NormWeight",
    "add_rms_norm",
    "bound_logits",
    "clamped_swiglu",
    "clamped_swiglu_op",
    "gather_op",
    "geglu",
    "geglu_op",
    "rms_norm",
    "rms_norm_op",
    "scale_rows_op",
    "swiglu",
    "swiglu_op",
]


class NormWeight(NamedTuple):
    """A norm over the last dimension; see `reference.rms_norm`. `offset` is what `weight` has in
    addition to what the checkpoint has."""

    weight: Tensor
    eps: float
    is_centred: bool = False
    offset: float = 0.0


def rms_norm(x: Tensor, norm: NormWeight) -> Tensor:
    """See `reference.rms_norm`."""
    if uses_triton(x):
        from kernels.elementwise import triton_ops

        rows = x.view(-1, x.shape[-1])
        normed = triton_ops.add_rms_norm(
            rows, None, norm.weight, norm.eps, is_centred=norm.is_centred
        )
        return normed.view_as(x)
    return reference.rms_norm(x, norm.weight, norm.eps, is_centred=norm.is_centred)


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    norm: NormWeight | None,
    rows: Tensor | None = None,
    delta_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> Tensor:
    """See `reference.add_rms_norm`."""
    weight, eps, is_centred, _ = norm or (None, 0.0, False, 0.0)
    compute = reference.add_rms_norm
    if uses_triton(hidden):
        from kernels.elementwise import triton_ops  # Triton is an extra that the CPU does without

        compute = triton_ops.add_rms_norm
    return compute(
        *(hidden, delta, weight, eps, rows),
        delta_scale=delta_scale,
        sum_scale=sum_scale,
        is_centred=is_centred,
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `reference.swiglu`; rows may be apart."""
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.swiglu(gate, up)
    return reference.swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `reference.geglu`; rows may be apart."""
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.geglu(gate, up)
    return reference.geglu(gate, up)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """See `reference.clamped_swiglu`; rows may be apart."""
    if uses_triton(gate):
        from kernels.elementwise import triton_ops

        return triton_ops.clamped_swiglu(gate, up, alpha, limit)
    return reference.clamped_swiglu(gate, up, alpha, limit)
