"""Recurrences: mixers whose state of a sequence has a fixed size.

The functions below run `reference` on CPUs and `triton_ops` on CUDA.

native          the operations in C++, for programs, at fixed addresses
reference       the definitions: plain torch, fp32
segments        where a step's tokens find states, and leave them
triton_kernels  the Triton kernels: convolution, the delta rule step by step and in chunks, gates
triton_ops      their launches; grids follow from the sizes of the segments' tensors alone
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.recurrence import reference
from kernels.recurrence.reference import (
    MAX_KERNEL,
    MAX_KEY_SIZE,
    MAX_VALUE_SIZE,
    DeltaHeads,
    gated_delta,
)
from kernels.recurrence.segments import NOWHERE, DeviceSegments, SegmentArrays, Segments

__all__ = [
    "MAX_KERNEL",
    "MAX_KEY_SIZE",
    "MAX_VALUE_SIZE",
    "NOWHERE",
    "DeltaHeads",
    "DeviceSegments",
    "SegmentArrays",
    "Segments",
    "causal_conv",
    "delta_rule",
    "gate_heads",
    "gated_conv",
    "gated_delta",
    "gated_norm",
]


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Convolves each channel of a sequence, and applies silu; see `reference.causal_conv`.

    Args:
        x: [T, channels]. Rows have unit stride and may be apart.
        weight: float32 [channels, size].
        states: float32 [slots, size - 1, channels], the last inputs of a sequence.
        segments: The step's; their tokens are x's.

    Returns:
        [T, channels] of x's dtype, contiguous.
    """
    if uses_triton(x):
        from kernels.recurrence import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.causal_conv(x, weight, states, segments)
    return reference.causal_conv(x, weight, states, segments)


def gated_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Convolves each channel of a sequence between two gates; see `reference.gated_conv`.

    Args:
        x: Gate, gate and input, [T, 3 * channels]. Rows have unit stride and may be apart.
        weight: float32 [channels, size].
        states: float32 [slots, size - 1, channels], the last gated inputs of a sequence.
        segments: The step's; their tokens are x's.

    Returns:
        [T, channels] of x's dtype, contiguous.
    """
    if uses_triton(x):
        from kernels.recurrence import triton_ops

        return triton_ops.gated_conv(x, weight, states, segments)
    return reference.gated_conv(x, weight, states, segments)


def delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    states: Tensor,
    segments: Segments,
    heads: DeltaHeads,
) -> Tensor:
    """The gated delta rule of what projections make; see `reference.delta_rule`.

    Args:
        qkv: [T, q, k and v of all heads], contiguous.
        b, a: [T, value heads]. Rows have unit stride and may be apart.
        log_rate, bias: float32 [value heads].
        states: float32 [slots, value heads, key size, value size].
        segments: The step's; their tokens are qkv's.
        heads: Numbers and sizes.

    Returns:
        [T, value heads * value size] of qkv's dtype, contiguous.
    """
    if uses_triton(qkv):
        from kernels.recurrence import triton_ops

        return triton_ops.delta_rule(qkv, b, a, log_rate, bias, states, segments, heads)
    return reference.delta_rule(qkv, b, a, log_rate, bias, states, segments, heads)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms each head, times silu of its gate; see `reference.gated_norm`.

    Args:
        x: [T, heads, size], contiguous; may be overwritten.
        gate: [T, heads, size]. Heads of a token lie side by side.
        weight: [size] of the gate's dtype, or [T, size] for each token.
        eps: Added to the mean square.

    Returns:
        [T, heads, size] of the gate's dtype.
    """
    if uses_triton(x):
        from kernels.recurrence import triton_ops

        return triton_ops.gated_norm(x, gate, weight, eps)
    return reference.gated_norm(x, gate, weight, eps)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x *= sigmoid(gate); see `reference.gate_heads`.

    Args:
        x: [T, size] of a float dtype, contiguous. Overwritten.
        gate: As x.

    Returns:
        x.
    """
    if uses_triton(x):
        from kernels.recurrence import triton_ops

        return triton_ops.gate_heads(x, gate)
    return reference.gate_heads(x, gate)
