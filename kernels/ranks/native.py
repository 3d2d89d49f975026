"""Sums, columns and rows of ranks in C++, for programs.

All ranks of a group run the same operations in the same order, with equal counts and as many
threads. They return at once, with anything as their result, when the memory has a fault: ask it
after a run."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name
from kernels.ranks.memory import RankMemory, RanksArgs


class _SumRanksArgs(ctypes.Structure):
    _fields_ = (
        ("ranks", RanksArgs),
        ("x", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


class _HandRowsArgs(ctypes.Structure):
    _fields_ = _SumRanksArgs._fields_


class _ColumnsArgs(ctypes.Structure):
    _fields_ = (
        ("ranks", RanksArgs),
        ("x", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("to_all", ctypes.c_int64),
    )


def sum_ranks_op(x: Tensor, count: Tensor, memory: RankMemory) -> NativeOp:
    """Builds x[:count] = the sum of all ranks' x[:count], as `reference.sum_ranks`.

    Args:
        x: [N, size], float32 or bfloat16, with rows of unit stride that may be apart.
        count: int32 [1], read when the program runs.
        memory: This rank's view of the memory.
    """
    _check(x, count)
    args = _SumRanksArgs(memory.args, x.data_ptr(), count.data_ptr(), x.shape[1], x.stride(0))
    return NativeOp("sum_ranks_" + dtype_name(x.dtype), args, (x, count, memory))


def rank_columns_op(
    x: Tensor, count: Tensor, part_size: int, memory: RankMemory, *, to_all: bool
) -> NativeOp:
    """Puts the columns of all ranks side by side in x[:count]: rank r computes the columns from r *
    part_size on, `part_size` or as many as there are.

    Args:
        x: float32 [N, size], with rows of unit stride that may be apart. It has this rank's
            columns.
        count: int32 [1], read when the program runs.
        part_size: The number of columns of each rank.
        memory: This rank's view of the memory.
        to_all: Whether all ranks get them, or only rank 0.
    """
    _check(x, count)
    assert x.dtype == torch.float32
    assert part_size * (memory.args.num_ranks - 1) < x.shape[1], "a rank has no column"
    args = _ColumnsArgs(
        memory.args, x.data_ptr(), count.data_ptr(), x.shape[1], x.stride(0), part_size, to_all
    )
    return NativeOp("rank_columns", args, (x, count, memory))


def hand_rows_op(x: Tensor, count: Tensor, memory: RankMemory) -> NativeOp:
    """Hands x[:count] of rank 0, which leaves it as it is, to rank 1 of a group of two, which gets
    it. Rank 0 waits for rank 1 only where it is two pieces behind.

    Args:
        x: [N, size], float32 or bfloat16, with rows of unit stride that may be apart.
        count: int32 [1], read when the program runs.
        memory: This rank's view of the memory.
    """
    assert memory.args.num_ranks == 2
    return _rows_op("hand_rows", x, count, memory)


def broadcast_rows_op(x: Tensor, count: Tensor, memory: RankMemory) -> NativeOp:
    """Gives x[:count] of rank 0, which leaves it as it is, to all other ranks of the group.

    Args:
        x: [N, size], float32 or bfloat16, with rows of unit stride that may be apart.
        count: int32 [1], read when the program runs.
        memory: This rank's view of the memory.
    """
    return _rows_op("broadcast_rows", x, count, memory)


def _rows_op(name: str, x: Tensor, count: Tensor, memory: RankMemory) -> NativeOp:
    _check(x, count)
    args = _HandRowsArgs(memory.args, x.data_ptr(), count.data_ptr(), x.shape[1], x.stride(0))
    return NativeOp(f"{name}_{dtype_name(x.dtype)}", args, (x, count, memory))


def _check(x: Tensor, count: Tensor) -> None:
    assert count.dtype == torch.int32
    assert x.dim() == 2
    assert x.stride(1) == 1
