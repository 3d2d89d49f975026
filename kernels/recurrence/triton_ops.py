"""Launches of the Triton kernels. Grids follow from the sizes of the segments' tensors alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise.triton_ops import power_of_2
from kernels.recurrence import triton_kernels as kernels
from kernels.recurrence.reference import DeltaHeads
from kernels.recurrence.segments import DeviceSegments, Segments

MIN_BLOCK = 16
"""The smallest side of a product on tensor cores."""


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Launches `reference.causal_conv`: x [T, channels] with rows of unit stride, weight fp32
    [channels, size] and states fp32 [slots, size - 1, channels] give [T, channels]."""
    assert x.shape[1] == len(weight)
    return _conv(x, weight, states, segments, is_gated=False)


def gated_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Launches `reference.gated_conv`: x [T, 3 * channels] of a float dtype and the others as for
    `causal_conv` give [T, channels] of x's dtype."""
    assert x.shape[1] == 3 * len(weight)
    return _conv(x, weight, states, segments, is_gated=True)


def _conv(
    x: Tensor, weight: Tensor, states: Tensor, segments: Segments, *, is_gated: bool
) -> Tensor:
    rows = _on_device(segments)
    channels, size = weight.shape
    num_tokens = len(x)
    assert x.stride(1) == 1
    assert weight.dtype == states.dtype == torch.float32
    assert weight.is_contiguous()
    assert states.is_contiguous()
    assert states.shape[1:] == (size - 1, channels)
    assert len(rows.tokens) == num_tokens
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    tuned = tuning.constants("causal_conv", channels=channels)
    block_t = 1 if num_tokens < tuned["many_tokens"] else tuned["block_t"]
    block_c = min(tuned["block_c"], power_of_2(channels))
    grid = (-(-num_tokens // block_t), -(-channels // block_c))
    kernels.causal_conv_kernel[grid](
        out,
        x,
        weight,
        states,
        rows.tokens,
        num_tokens,
        x.stride(0),
        CHANNELS=channels,
        SIZE=size,
        IS_GATED=is_gated,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=max(1, min(8, block_t * block_c // tuned["elements_per_warp"])),
    )
    return out


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
    """Launches `reference.delta_rule`: qkv [T, size], b and a [T, value heads] with rows of unit
    stride, log_rate and bias fp32 [value heads] and states fp32 [slots, value heads, key size,
    value size] give [T, value heads * value size]."""
    num_keys, num_values, key_size, value_size = heads
    assert qkv.is_contiguous()
    assert states.is_contiguous()
    assert b.stride() == a.stride()
    assert b.stride(1) == 1
    assert log_rate.dtype == bias.dtype == states.dtype == torch.float32
    assert states.shape[1:] == (num_values, key_size, value_size)
    assert qkv.shape[1] == 2 * num_keys * key_size + num_values * value_size
    size = num_values * value_size
    out = torch.empty((len(qkv), size), dtype=qkv.dtype, device=qkv.device)
    rows = _on_device(segments)
    of_rows = (rows.firsts, rows.starts, rows.read, rows.written)
    inputs = (out, qkv, b, a, log_rate, bias, states, *of_rows, b.stride(0), key_size**-0.5)
    num_rows = len(rows.firsts) - 1
    sizes = {
        "NUM_KEY_HEADS": num_keys,
        "NUM_VALUE_HEADS": num_values,
        "K": key_size,
        "V": value_size,
        "BLOCK_K": max(MIN_BLOCK, power_of_2(key_size)),
    }
    in_chunks = tuning.constants("delta_chunks", key_size=key_size, itemsize=qkv.itemsize)
    has_chunks = rows.has_chunks and in_chunks["chunk"] > 1
    if rows.has_steps or not has_chunks:
        tuned = tuning.constants("delta_step", key_size=key_size)
        block_v = _block_of(value_size, tuned["block_v"])
        kernels.delta_step_kernel[(num_rows, num_values, -(-value_size // block_v))](
            *inputs,
            **sizes,
            BLOCK_V=block_v,
            OF_ALL=in_chunks["chunk"] == 1,
            num_warps=tuned["num_warps"],
        )
    if has_chunks:
        block_v = _block_of(value_size, in_chunks["block_v"])
        kernels.delta_chunks_kernel[(num_rows, num_values, -(-value_size // block_v))](
            *inputs,
            **sizes,
            BLOCK_V=block_v,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            SOLVE_PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32x3",
            num_warps=in_chunks["num_warps"],
            num_stages=in_chunks["num_stages"],
        )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launches `reference.gated_norm`, in place: x [T, heads, size], gate of the same shape, whose
    tokens may be apart, weight [size] or [T, size], all of one float dtype."""
    num_tokens, num_heads, size = x.shape
    assert x.dtype == gate.dtype == weight.dtype
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert gate.stride()[1:] == (size, 1)
    tuned = tuning.constants("gated_norm", size=size)
    block_s = power_of_2(size)
    block_h = min(tuned["block_h"], power_of_2(num_heads))
    kernels.gated_norm_kernel[(num_tokens, -(-num_heads // block_h))](
        x,
        gate,
        weight,
        eps,
        num_heads,
        gate.stride(0),
        SIZE=size,
        OF_TOKENS=weight.dim() == 2,
        BLOCK_H=block_h,
        BLOCK_S=block_s,
        num_warps=max(1, min(8, block_h * block_s // tuned["elements_per_warp"])),
    )
    return x


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Launches `reference.gate_heads`, in place: both [T, size] of one float dtype."""
    assert x.is_contiguous()
    assert gate.is_contiguous()
    assert x.shape == gate.shape
    num_tokens, size = x.shape
    tuned = tuning.constants("swiglu", size=size)
    block = min(tuned["block"], power_of_2(size))
    kernels.gate_heads_kernel[(num_tokens, -(-size // block))](
        x,
        gate,
        SIZE=size,
        BLOCK_S=block,
        num_warps=max(1, block // tuned["elements_per_warp"]),
    )
    return x


def _on_device(segments: Segments) -> DeviceSegments:
    assert segments.on_device is not None, "segments of a step for the CPU"
    return segments.on_device


def _block_of(value_size: int, most: int) -> int:
    return min(most, max(MIN_BLOCK, power_of_2(value_size)))
