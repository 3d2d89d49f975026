"""Launches of the Triton kernels: one each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise import triton_kernels as kernels


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None = None
) -> Tensor:
    """See `reference.add_rms_norm`. Tensors are contiguous."""
    assert hidden.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == hidden.shape)
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size if rows is None else len(rows)
    out = torch.empty((num_rows, size), dtype=hidden.dtype, device=hidden.device)
    block, tuned = power_of_2(size), tuning.constants("add_rms_norm", size=size)
    kernels.add_rms_norm_kernel[(num_rows,)](
        out,
        hidden,
        delta,
        weight,
        rows,
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(tuned["max_warps"], max(1, block // tuned["elements_per_warp"])),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `reference.swiglu`."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    tuned = tuning.constants("swiglu", size=size)
    block = min(tuned["block"], power_of_2(size))
    kernels.swiglu_kernel[(num_tokens, -(-size // block))](
        out,
        gate_up,
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, block // tuned["elements_per_warp"]),
    )
    return out


def power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
