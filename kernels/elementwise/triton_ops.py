"""Launches of the Triton kernels: one each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise import triton_kernels as kernels


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    rows: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_centred: bool = False,
) -> Tensor:
    """See `reference.add_rms_norm`. Tensors are contiguous."""
    assert hidden.is_contiguous()
    if weight is None:
        return _added(hidden, delta, rows, scale)
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
        scale,
        SIZE=size,
        BLOCK=block,
        IS_SCALED=scale != 1.0,
        IS_CENTRED=is_centred,
        num_warps=min(tuned["max_warps"], max(1, block // tuned["elements_per_warp"])),
    )
    return out


def _added(hidden: Tensor, delta: Tensor | None, rows: Tensor | None, scale: float) -> Tensor:
    """Adds without a norm: torch's own kernels do it in one pass, or two where `delta` is scaled,
    so that it is rounded as the definition says."""
    if rows is not None:
        chosen = hidden.index_select(0, rows)
        hidden, delta = chosen, None if delta is None else delta.index_select(0, rows)
    if delta is not None:
        hidden += delta if scale == 1.0 else delta.mul_(scale)
    return hidden


def swiglu(gate_up: Tensor) -> Tensor:
    """See `reference.swiglu`."""
    return _gated(gate_up, is_gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """See `reference.geglu`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
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
        IS_GELU=is_gelu,
        num_warps=max(1, block // tuned["elements_per_warp"]),
    )
    return out


def power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
