"""The operations in C++, for programs: each builds its arguments at fixed addresses.

Tensors are contiguous, unless it says otherwise, with at least as many rows as `count`, int32 [1],
will ever say, which is read when the program runs. Fields that are named may change between runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name, pointer
from kernels.pictures.reference import CHANNELS, Merging

MAX_BLENDED = 4
"""The most rows of a table that are blended."""
_KINDS, _QUARTERS = 3, 4
_MERGING = {Merging.SIDE_BY_SIDE: 0, Merging.TAKING_TURNS: 1, Merging.MEAN: 2}


class CutPatchesArgs(ctypes.Structure):
    """`pixels` is the address of a tile, and `width` its pixels in a row."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("side", ctypes.c_int64),
    )


class _AddBlendArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("blended", ctypes.c_int64),
    )


class _ClipArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    )


class _ArrangeHeadsArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("weights", ctypes.c_void_p * _KINDS),
        ("count", ctypes.c_void_p),
        ("weight_strides", ctypes.c_int64 * _KINDS),
        ("stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("places", ctypes.c_int64 * _QUARTERS),
        ("eps", ctypes.c_float),
    )


class _StandardiseArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _MergePatchesArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("patches", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("merging", ctypes.c_int64),
    )


class CopyRowsArgs(ctypes.Structure):
    """`source` and `target` are addresses of rows."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("target_stride", ctypes.c_int64),
    )


def cut_patches_op(
    values: Tensor, rows: Tensor, columns: Tensor, out: Tensor, count: Tensor, *, side: int
) -> NativeOp:
    """Builds out[:count] = `reference.cut_patches`; the pixels are said before each run. out: fp32
    [P, CHANNELS * side * side]."""
    assert out.dtype == torch.float32
    args = _cut_args(values, rows, columns, out, count, side)
    return NativeOp("cut_patches", args, (values, rows, columns, out, count))


def read_patches_op(
    values: Tensor, rows: Tensor, columns: Tensor, out: Tensor, count: Tensor, *, side: int
) -> NativeOp:
    """Builds out[:count] = `reference.by_pixel` of `reference.cut_patches`, as `cut_patches_op`.
    out: [P, side * side * CHANNELS], float32 or bfloat16."""
    name = f"read_patches_{dtype_name(out.dtype)}"
    args = _cut_args(values, rows, columns, out, count, side)
    return NativeOp(name, args, (values, rows, columns, out, count))


def _cut_args(
    values: Tensor, rows: Tensor, columns: Tensor, out: Tensor, count: Tensor, side: int
) -> CutPatchesArgs:
    assert values.dtype == torch.float32
    assert values.shape == (CHANNELS, 256)
    assert rows.dtype == columns.dtype == torch.int64
    assert out.shape[1] == CHANNELS * side * side
    _check(count, values, rows, columns, out)
    return CutPatchesArgs(
        values=values.data_ptr(),
        rows=rows.data_ptr(),
        columns=columns.data_ptr(),
        out=out.data_ptr(),
        count=count.data_ptr(),
        side=side,
    )


def add_blend_op(
    x: Tensor, table: Tensor, rows: Tensor, weights: Tensor, count: Tensor
) -> NativeOp:
    """Builds `reference.add_blend` of the first rows, in place, of up to MAX_BLENDED rows each. x:
    [T, size], float32 or bfloat16."""
    assert x.dtype == table.dtype
    assert x.shape[1] == table.shape[1]
    assert rows.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert 1 <= rows.shape[1] == weights.shape[1] <= MAX_BLENDED
    _check(count, x, table, rows, weights)
    args = _AddBlendArgs(
        x.data_ptr(),
        table.data_ptr(),
        rows.data_ptr(),
        weights.data_ptr(),
        count.data_ptr(),
        x.shape[1],
        rows.shape[1],
    )
    return NativeOp(f"add_blend_{dtype_name(x.dtype)}", args, (x, table, rows, weights, count))


def clip_op(x: Tensor, out: Tensor, count: Tensor, *, least: float, most: float) -> NativeOp:
    """Builds out[:count] = `reference.clip`. x, out: [T, size] of one dtype, float32 or bfloat16,
    whose rows have unit stride and may be apart; `out` may be x."""
    assert x.dtype == out.dtype
    assert x.shape[1] == out.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    _check(count)
    args = _ClipArgs(
        x.data_ptr(),
        out.data_ptr(),
        count.data_ptr(),
        x.shape[1],
        x.stride(0),
        out.stride(0),
        least,
        most,
    )
    return NativeOp(f"clip_{dtype_name(x.dtype)}", args, (x, out, count))


def arrange_heads_op(
    qkv: Tensor,
    weights: Sequence[Tensor],
    count: Tensor,
    *,
    head_dim: int,
    eps: float,
    quarters: Sequence[int] | None,
) -> NativeOp:
    """Builds `reference.arrange_heads` of the first rows, in place. qkv: [T, 3 * heads * head_dim],
    float32 or bfloat16, whose rows have unit stride and may be apart."""
    assert qkv.stride(1) == 1
    assert head_dim % _QUARTERS == 0
    assert all(each.dtype == torch.float32 for each in weights)
    _check(count, *weights)
    order = range(_QUARTERS) if quarters is None else quarters
    args = _ArrangeHeadsArgs(
        qkv=qkv.data_ptr(),
        weights=(ctypes.c_void_p * _KINDS)(*(each.data_ptr() for each in weights)),
        count=count.data_ptr(),
        weight_strides=(ctypes.c_int64 * _KINDS)(
            *(0 if each.dim() == 1 else each.stride(0) for each in weights)
        ),
        stride=qkv.stride(0),
        num_heads=qkv.shape[1] // _KINDS // head_dim,
        head_dim=head_dim,
        places=(ctypes.c_int64 * _QUARTERS)(*(order.index(each) for each in range(_QUARTERS))),
        eps=eps,
    )
    return NativeOp(f"arrange_heads_{dtype_name(qkv.dtype)}", args, (qkv, *weights, count))


def standardise_op(
    x: Tensor, count: Tensor, *, scale: float, bias: Tensor | None, factor: Tensor | None
) -> NativeOp:
    """Builds `reference.standardise` of the first rows, in place. x: [M, size], float32 or
    bfloat16; bias, factor: fp32 [size], or None."""
    assert (bias is None) == (factor is None)
    assert all(each is None or each.dtype == torch.float32 for each in (bias, factor))
    _check(count, x, *(each for each in (bias, factor) if each is not None))
    args = _StandardiseArgs(
        x.data_ptr(), pointer(bias), pointer(factor), count.data_ptr(), x.shape[1], scale
    )
    return NativeOp(f"standardise_{dtype_name(x.dtype)}", args, (x, bias, factor, count))


def merge_patches_op(
    x: Tensor, out: Tensor, count: Tensor, *, patches: int, merging: Merging
) -> NativeOp:
    """Builds out[:count] = `reference.merge_patches` of cells of so many `patches`. x: [T, size],
    float32 or bfloat16."""
    assert x.dtype == out.dtype
    assert out.shape[1] == x.shape[1] * (1 if merging is Merging.MEAN else patches)
    _check(count, x, out)
    args = _MergePatchesArgs(
        x.data_ptr(), out.data_ptr(), count.data_ptr(), patches, x.shape[1], _MERGING[merging]
    )
    return NativeOp(f"merge_patches_{dtype_name(x.dtype)}", args, (x, out, count))


def copy_rows_op(source: Tensor, target: Tensor, count: Tensor) -> NativeOp:
    """Builds target[:count] = source[:count]: both [T, size] of one dtype, whose rows have unit
    stride and may be apart."""
    assert source.dtype == target.dtype
    assert source.shape[1] == target.shape[1]
    assert source.stride(1) == 1
    args = _copy_args(target, count)
    args.source, args.target = source.data_ptr(), target.data_ptr()
    args.source_stride = source.stride(0) * source.element_size()
    return NativeOp("copy_rows", args, (source, target, count))


def load_rows_op(rows: Tensor, count: Tensor, stride: int | None = None) -> NativeOp:
    """Builds a copy of as many rows from `source`, which is said before each run, and whose rows
    are as far apart, or `stride` elements. rows: [N, size], of unit stride."""
    args = _copy_args(rows, count)
    args.target = rows.data_ptr()
    if stride is not None:
        args.source_stride = stride * rows.element_size()
    return NativeOp("copy_rows", args, (rows, count))


def store_rows_op(rows: Tensor, count: Tensor) -> NativeOp:
    """Builds a copy of as many rows to `target`; see `load_rows_op`."""
    args = _copy_args(rows, count)
    args.source = rows.data_ptr()
    return NativeOp("copy_rows", args, (rows, count))


def _copy_args(rows: Tensor, count: Tensor) -> CopyRowsArgs:
    assert rows.stride(1) == 1
    _check(count)
    stride = rows.stride(0) * rows.element_size()
    return CopyRowsArgs(
        count=count.data_ptr(),
        num_bytes=rows.shape[1] * rows.element_size(),
        source_stride=stride,
        target_stride=stride,
    )


def _check(count: Tensor, *tensors: Tensor) -> None:
    assert count.dtype == torch.int32
    assert all(each.is_contiguous() for each in tensors)
