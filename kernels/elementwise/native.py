"""The element-wise operations for programs: each builds its arguments at fixed addresses.

Tensors are contiguous, unless it says otherwise, of one dtype (float32 or bfloat16), with at least
as many rows as `count` will ever say. Counts are read when the program runs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name, pointer


class _GatherArgs(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("last_row", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("is_part", ctypes.c_int64),
    )


class _RmsNormArgs(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("rows_per_count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("delta_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("bias_stride", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
        ("is_centred", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("delta_scale", ctypes.c_float),
        ("sum_scale", ctypes.c_float),
    )


class _SumSquaresArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class _NormBySumArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("sums_stride", ctypes.c_int64),
        ("num_summed", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _GatedArgs(ctypes.Structure):
    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("up_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class _ClampedSwigluArgs(ctypes.Structure):
    _fields_ = (("gated", _GatedArgs), ("alpha", ctypes.c_float), ("limit", ctypes.c_float))


class _ActivateArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class _AddRowsArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
    )


class _ScaleArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def gather_op(
    source: Tensor, out: Tensor, rows: Tensor, count: Tensor, *, first_row: int | None = None
) -> NativeOp:
    """out[i] = source[rows[i]] for i < count: tokens' embeddings, or some rows of a step.

    source: [S, size], of unit stride in its rows, out: [N, size], rows: int64 [N], count: int32
    [1]. A row behind the last counts as the last: tokens that adapters add get theirs later. With
    `first_row` the source is the part of a whole that begins with this row, and rows of other parts
    are zero.
    """
    _check(count, out)
    _check_rows(out.shape[1], out.dtype, source)
    assert rows.dtype == torch.int64
    args = _GatherArgs(
        source=source.data_ptr(),
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        count=count.data_ptr(),
        size=out.shape[1],
        source_stride=source.stride(0),
        last_row=len(source) - 1,
        first_row=first_row or 0,
        is_part=first_row is not None,
    )
    return NativeOp("gather_" + dtype_name(out.dtype), args, (source, out, rows, count))


def rms_norm_op(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    count: Tensor,
    *,
    eps: float,
    delta_scale: float = 1.0,
    sum_scale: float = 1.0,
    is_centred: bool = False,
    bias: Tensor | None = None,
    rows_per_count: int = 1,
) -> NativeOp:
    """hidden = sum_scale * (hidden + delta_scale * delta); out = RMSNorm(hidden) * weight, for the
    first `count` (int32 [1]) rows, or so many times `rows_per_count`: see `reference.add_rms_norm`.

    weight: [size], in the others' dtype or in float32, or [N, size], of each count; None: nothing
    but the addition. `out` may be `hidden` itself; rows of it and of `delta` may
    be apart. Centred norms have weights in float32, and perhaps a `bias`, shaped as weights are.
    """
    assert bias is None or (is_centred and bias.dtype == torch.float32)
    assert delta is not None or sum_scale == 1.0
    _check(count, hidden)
    _check_rows(hidden.shape[1], hidden.dtype, out, *(() if delta is None else (delta,)))
    is_wide = weight is not None and (is_centred or weight.dtype != hidden.dtype)
    assert weight is None or weight.is_contiguous()
    assert weight is None or weight.dtype == (torch.float32 if is_wide else hidden.dtype)
    args = _RmsNormArgs(
        hidden.data_ptr(),
        None if delta is None else delta.data_ptr(),
        pointer(weight),
        pointer(bias),
        out.data_ptr(),
        count.data_ptr(),
        rows_per_count,
        hidden.shape[1],
        0 if delta is None else delta.stride(0),
        out.stride(0),
        _row_stride(weight),
        _row_stride(bias),
        is_wide,
        is_centred,
        eps,
        delta_scale,
        sum_scale,
    )
    keep = (hidden, delta, weight, bias, out, count)
    return NativeOp("rms_norm_" + dtype_name(hidden.dtype), args, keep)


def _row_stride(weight: Tensor | None) -> int:
    """Returns how far apart the weights of rows are; 0: all rows have one."""
    return 0 if weight is None or weight.dim() == 1 else weight.stride(0)


def sum_squares_op(x: Tensor, out: Tensor, count: Tensor) -> NativeOp:
    """Builds out[t] = sum(x[t]^2) for t < count.

    x: [T, size], with rows of unit stride that may be apart; out: float32 [T], whose elements may
    be apart; count: int32 [1].
    """
    _check(count)
    _check_rows(x.shape[1], x.dtype, x)
    assert out.dtype == torch.float32
    assert out.dim() == 1
    args = _SumSquaresArgs(
        x=x.data_ptr(),
        out=out.data_ptr(),
        count=count.data_ptr(),
        size=x.shape[1],
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    return NativeOp("sum_squares_" + dtype_name(x.dtype), args, (x, out, count))


def norm_by_sum_op(
    x: Tensor, weight: Tensor, eps: float, sums: Tensor, count: Tensor, *, num_summed: int
) -> NativeOp:
    """Builds x = reference.norm_by_sum(x, ...), in place, for the first `count` rows.

    Args:
        x: [T, size], with rows of unit stride that may be apart.
        weight: [size] of x's dtype or float32, or [T, size], one of each row; contiguous.
        eps: Added to the mean square.
        sums: Squares of all elements, float32 [T], which may be apart.
        count: int32 [1], read when the program runs.
        num_summed: The number of all elements.
    """
    _check(count)
    _check_rows(x.shape[1], x.dtype, x)
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.is_contiguous()
    assert weight.shape[-1] == x.shape[1]
    assert sums.dtype == torch.float32
    args = _NormBySumArgs(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        sums=sums.data_ptr(),
        count=count.data_ptr(),
        size=x.shape[1],
        x_stride=x.stride(0),
        weight_stride=weight.stride(0) if weight.dim() == 2 else 0,
        sums_stride=sums.stride(0),
        num_summed=num_summed,
        is_wide=weight.dtype == torch.float32,
        eps=eps,
    )
    return NativeOp("norm_by_sum_" + dtype_name(x.dtype), args, (x, weight, sums, count))


def swiglu_op(gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = silu(gate) * up for the first `num_tokens` rows.

    Args:
        gate: [T, size] of out's dtype, with rows of unit stride.
        up: As gate.
        out: [T, size]; rows as of gate.
        num_tokens: int32 [1], read when the program runs.
    """
    return _gated_op("swiglu", gate, up, out, num_tokens)


def geglu_op(gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = gelu(gate) * up, approximated by tanh. gate, up, out: [T, size], num_tokens:
    int32 [1], as in `swiglu_op`."""
    return _gated_op("geglu", gate, up, out, num_tokens)


def exact_geglu_op(gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = gelu(gate) * up. gate, up, out: [T, size], num_tokens: int32 [1], as in
    `swiglu_op`."""
    return _gated_op("exact_geglu", gate, up, out, num_tokens)


def silu_op(x: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = silu(x) for the first `num_tokens` rows.

    Args:
        x: [T, size] of out's dtype, with rows of unit stride that may be apart.
        out: [T, size]; rows as of x.
        num_tokens: int32 [1], read when the program runs.
    """
    return _activate_op("silu", x, out, num_tokens)


def gelu_op(x: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = gelu(x), as `silu_op`: x, out [T, size] of one float dtype, num_tokens int32
    [1]."""
    return _activate_op("gelu", x, out, num_tokens)


def gelu_tanh_op(x: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out = gelu(x), approximated by tanh, as `gelu_op`: x, out [T, size] of one float
    dtype, num_tokens int32 [1]."""
    return _activate_op("gelu_tanh", x, out, num_tokens)


def quick_gelu_op(x: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """out[t] = x[t] * sigmoid(1.702 * x[t]), rounded once; see `silu_op`."""
    return _activate_op("quick_gelu", x, out, num_tokens)


def _activate_op(name: str, x: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    _check(num_tokens)
    _check_rows(out.shape[1], out.dtype, x, out)
    args = _ActivateArgs(
        x.data_ptr(),
        out.data_ptr(),
        num_tokens.data_ptr(),
        out.shape[1],
        x.stride(0),
        out.stride(0),
    )
    return NativeOp(f"{name}_{dtype_name(out.dtype)}", args, (x, out, num_tokens))


def add_rows_op(
    x: Tensor,
    rows: Tensor | None,
    types: Tensor | None,
    table: Tensor | None,
    positions: Tensor,
    num_tokens: Tensor,
    *,
    first_row: int = 0,
) -> NativeOp:
    """Builds x[t] = round(x[t] + rows[types[t]]) + table[first_row + positions[t]], in place, for
    the first `num_tokens` rows.

    Args:
        x: [T, size], contiguous.
        rows: [K, size] of x's dtype, contiguous. None: nothing of them is added.
        types: int64 [T], below K. None: all are 0.
        table: [S, size] of x's dtype, contiguous. None: nothing of it is added.
        positions: int64 [T]; all rows that they name are in the table.
        num_tokens: int32 [1], read when the program runs.
        first_row: The row of position 0.
    """
    _check(num_tokens, x, *(each for each in (rows, table) if each is not None))
    assert positions.dtype == torch.int64
    assert types is None or types.dtype == torch.int64
    args = _AddRowsArgs(
        x.data_ptr(),
        pointer(rows),
        pointer(types),
        pointer(table),
        positions.data_ptr(),
        num_tokens.data_ptr(),
        x.shape[1],
        first_row,
    )
    keep = (x, rows, types, table, positions, num_tokens)
    return NativeOp(f"add_rows_{dtype_name(x.dtype)}", args, keep)


def clamped_swiglu_op(
    gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor, *, alpha: float, limit: float
) -> NativeOp:
    """Builds `reference.clamped_swiglu`. gate, up, out: [T, size], num_tokens: int32 [1], as in
    `swiglu_op`."""
    args = _ClampedSwigluArgs(_gated_args(gate, up, out, num_tokens), alpha, limit)
    name = f"clamped_swiglu_{dtype_name(out.dtype)}"
    return NativeOp(name, args, (gate, up, out, num_tokens))


def _gated_args(gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor) -> _GatedArgs:
    _check(num_tokens)
    _check_rows(out.shape[1], out.dtype, gate, up, out)
    return _GatedArgs(
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        size=out.shape[1],
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        out_stride=out.stride(0),
    )


def _gated_op(name: str, gate: Tensor, up: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    args = _gated_args(gate, up, out, num_tokens)
    return NativeOp(f"{name}_{dtype_name(out.dtype)}", args, (gate, up, out, num_tokens))


def scale_rows_op(
    x: Tensor, count: Tensor, *, scale: float, softcap: float | None = None
) -> NativeOp:
    """Builds x = bound_logits(x, scale, softcap), in place.

    Args:
        x: [N, size], contiguous.
        count: Number of rows to compute, from the first: int32 [1], read when the program runs.
        scale: Factor of x.
        softcap: Bound of the result, above 0. None: none.
    """
    _check(count, x)
    assert softcap is None or softcap > 0
    args = _ScaleArgs(x.data_ptr(), count.data_ptr(), x.shape[1], scale, softcap or 0.0)
    return NativeOp("scale_rows_" + dtype_name(x.dtype), args, (x, count))


def _check(count: Tensor, *tensors: Tensor) -> None:
    assert count.dtype == torch.int32
    for tensor in tensors:
        assert tensor.dtype == tensors[0].dtype
        assert tensor.is_contiguous()


def _check_rows(size: int, dtype: torch.dtype, *tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert tensor.shape[1] == size
        assert tensor.stride(1) == 1
