"""What the decoder computes between its projections: norms, activations, gathers.

The functions below run `reference` on CPUs and `triton_ops` on CUDA.

native          the operations in C++, for programs: each builds its arguments at fixed addresses
reference       the definitions, in torch, with transformers' rounding
triton_kernels  the Triton kernels: each is one pass over its rows
triton_ops      their launches
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.elementwise import reference
from kernels.elementwise.native import gather_op, rms_norm_op, swiglu_op

__all__ = ["add_rms_norm", "gather_op", "rms_norm_op", "swiglu", "swiglu_op"]


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """See `reference.add_rms_norm`."""
    if uses_triton(hidden):
        from kernels.elementwise import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.add_rms_norm(hidden, delta, weight, eps, rows)
    return reference.add_rms_norm(hidden, delta, weight, eps, rows)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `reference.swiglu`."""
    if uses_triton(gate_up):
        from kernels.elementwise import triton_ops

        return triton_ops.swiglu(gate_up)
    return reference.swiglu(gate_up)
