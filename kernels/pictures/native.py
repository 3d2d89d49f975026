"""The operations in C++, for programs: each builds its arguments at fixed addresses.

Tensors are contiguous, unless it says otherwise, with at least as many rows as `count`, int32 [1],
will ever say, which is read when the program runs. Fields that are named may change between runs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name
from kernels.pictures.reference import CHANNELS, Merging

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
    assert values.dtype == out.dtype == torch.float32
    assert values.shape == (CHANNELS, 256)
    assert rows.dtype == columns.dtype == torch.int64
    assert out.shape[1] == CHANNELS * side * side
    _check(count, values, rows, columns, out)
    args = CutPatchesArgs(
        values=values.data_ptr(),
        rows=rows.data_ptr(),
        columns=columns.data_ptr(),
        out=out.data_ptr(),
        count=count.data_ptr(),
        side=side,
    )
    return NativeOp("cut_patches", args, (values, rows, columns, out, count))


def add_blend_op(
    x: Tensor, table: Tensor, rows: Tensor, weights: Tensor, count: Tensor
) -> NativeOp:
    """Builds `reference.add_blend` of the first rows, in place. x: [T, size], float32 or
    bfloat16."""
    assert x.dtype == table.dtype
    assert x.shape[1] == table.shape[1]
    assert rows.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert rows.shape[1] == weights.shape[1] == 4
    _check(count, x, table, rows, weights)
    args = _AddBlendArgs(
        x.data_ptr(),
        table.data_ptr(),
        rows.data_ptr(),
        weights.data_ptr(),
        count.data_ptr(),
        x.shape[1],
    )
    return NativeOp(f"add_blend_{dtype_name(x.dtype)}", args, (x, table, rows, weights, count))


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


def load_rows_op(rows: Tensor, count: Tensor) -> NativeOp:
    """Builds a copy of as many rows from `source`, which is said before each run, and whose rows
    are as far apart. rows: [N, size], of unit stride."""
    args = _copy_args(rows, count)
    args.target = rows.data_ptr()
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
