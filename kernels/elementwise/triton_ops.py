"""Launches of the Triton kernels: one each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise import reference
from kernels.elementwise import triton_kernels as kernels
from kernels.elementwise.addend import Addend


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
    """Launches `reference.add_rms_norm`: hidden, delta and addend [T, size], weight [size] or [T,
    size], and bias, of one shape, rows int64 [N] give [T, size] or [N, size]. Tensors are
    contiguous."""
    assert hidden.is_contiguous()
    assert weight is None or weight.is_contiguous()
    if bias is not None:
        assert weight is not None
        assert weight.dtype == bias.dtype == torch.float32
        assert bias.is_contiguous()
        assert bias.shape == weight.shape
    if weight is None:
        # Nothing is launched of ours: torch's own kernels round as the definition says.
        return reference.add_rms_norm(
            hidden,
            delta,
            None,
            eps,
            rows,
            delta_scale=delta_scale,
            sum_scale=sum_scale,
            addend=addend,
        )
    values, slots = addend or (None, None)
    for each in (delta, values):
        assert each is None or (each.is_contiguous() and each.shape == hidden.shape)
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size if rows is None else len(rows)
    out = torch.empty((num_rows, size), dtype=hidden.dtype, device=hidden.device)
    block, tuned = power_of_2(size), tuning.constants("add_rms_norm", size=size)
    kernels.add_rms_norm_kernel[(num_rows,)](
        out,
        hidden,
        delta,
        weight,
        bias,
        rows,
        values,
        slots,
        eps,
        delta_scale,
        sum_scale,
        SIZE=size,
        BLOCK=block,
        IS_SCALED=(delta_scale, sum_scale) != (1.0, 1.0),
        IS_CENTRED=is_centred,
        ROWS_PER_WEIGHT=0 if weight.dim() == 1 else num_rows // len(weight),
        num_warps=min(tuned["max_warps"], max(1, block // tuned["elements_per_warp"])),
    )
    return out


def swiglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Launches `reference.swiglu`: gate, up [T, size] of one float dtype, addend [T, 2 * size] ->
    [T, size] of this dtype. Rows have unit stride."""
    return _gated(gate, up, addend, is_gelu=False)


def geglu(gate: Tensor, up: Tensor, addend: Addend | None = None) -> Tensor:
    """Launches `reference.geglu`: gate, up [T, size] of one float dtype, addend [T, 2 * size] ->
    [T, size] of this dtype. Rows have unit stride."""
    return _gated(gate, up, addend, is_gelu=True)


def _gated(gate: Tensor, up: Tensor, addend: Addend | None, *, is_gelu: bool) -> Tensor:
    out, grid, sizes = _gated_launch(gate, up)
    values, slots = addend or (None, None)
    if values is not None:
        assert values.is_contiguous()
        assert values.shape == (len(gate), 2 * gate.shape[1])
    kernels.swiglu_kernel[grid](
        out, gate, up, values, slots, gate.stride(0), up.stride(0), IS_GELU=is_gelu, **sizes
    )
    return out


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Launches `reference.clamped_swiglu`: gate, up [T, size] of one float dtype -> [T, size] of
    this dtype, with rows of unit stride."""
    out, grid, sizes = _gated_launch(gate, up)
    kernels.clamped_swiglu_kernel[grid](
        out, gate, up, gate.stride(0), up.stride(0), float(alpha), float(limit), **sizes
    )
    return out


def _gated_launch(gate: Tensor, up: Tensor) -> tuple[Tensor, tuple[int, int], dict[str, int]]:
    """Returns the output, the grid and the sizes of a launch."""
    assert gate.stride(1) == up.stride(1) == 1
    num_tokens, size = gate.shape
    out = torch.empty((num_tokens, size), dtype=gate.dtype, device=gate.device)
    tuned = tuning.constants("swiglu", size=size)
    block = min(tuned["block"], power_of_2(size))
    num_warps = max(1, block // tuned["elements_per_warp"])
    grid = (num_tokens, -(-size // block))
    return out, grid, {"SIZE": size, "BLOCK": block, "num_warps": num_warps}


def power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
