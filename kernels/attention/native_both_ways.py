"""Attention without a causal mask in C++ (`both_ways.cpp` in `kernels/native/src`), for programs.

Every array of a step lies at a fixed address, and its contents and counts are read when the program
runs. Tensors are float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.kv_cache import TILE_CELLS
from kernels.attention.plan import AttentionPlan
from kernels.native.library import Library, NativeOp, dtype_name, load

_BLOCK_CELLS = 64
_SEGMENT_CELLS = 256
_MAX_PRODUCT_ROWS = 16
_LINE_BYTES = 64
_PAIR_BYTES = 4


class PackedArgs(ctypes.Structure):
    """Addresses of `PackedCells`; none: there are none."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("max_cells", ctypes.c_int64),
    )


class BothWaysArgs(ctypes.Structure):
    """All but strides and sizes may change between runs."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("reach", ctypes.c_int64),
        ("max_cells", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
        ("end_head", ctypes.c_int64),
        ("packed", PackedArgs),
        ("scale", ctypes.c_float),
    )


class PackBothWaysArgs(ctypes.Structure):
    """`first` and `packed` may change between runs."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("packed", PackedArgs),
    )


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Keys and values of a row, as products read them; see both_ways.cpp."""

    keys: Tensor
    values: Tensor
    max_cells: int

    @classmethod
    def allocate(cls, num_heads: int, shape: BothWaysShape, dtype: torch.dtype) -> PackedCells:
        """Returns memory for a row of the shape's length. Only the end of the values is written
        to: to clear all of a large image's memory takes longer than a step of text."""
        size = cls.size_of(num_heads, shape) // 2
        keys, values = (torch.empty(size, dtype=dtype) for _ in range(2))
        pair = _PAIR_BYTES // dtype.itemsize
        pairs = values.view(num_heads, shape.max_cells // pair, shape.width * pair)
        # The weights of cells behind the row's end are 0, and so must be their products.
        pairs[:, shape.max_length // pair :].zero_()
        return cls(keys, values, shape.max_cells)

    @staticmethod
    def size_of(num_heads: int, shape: BothWaysShape) -> int:
        """Returns the elements of both."""
        return 2 * num_heads * shape.max_cells * shape.width

    @property
    def args(self) -> PackedArgs:
        """The addresses."""
        return PackedArgs(self.keys.data_ptr(), self.values.data_ptr(), self.max_cells)


@dataclass(frozen=True, slots=True)
class BothWaysShape:
    """The sizes that a thread's memory depends on: of a head, of an element in bytes, and of the
    longest row of a step in tokens."""

    head_dim: int
    item_bytes: int
    max_length: int

    @property
    def max_cells(self) -> int:
        """The cells of the longest row, in whole blocks."""
        return -(-self.max_length // _BLOCK_CELLS) * _BLOCK_CELLS

    @property
    def width(self) -> int:
        """The elements of a head, in whole tiles."""
        return -(-self.head_dim // TILE_CELLS) * TILE_CELLS

    @property
    def thread_bytes(self) -> int:
        """The memory of a thread, as both_ways.cpp carves it up, for the widest vectors."""
        width, rows = self.width, _MAX_PRODUCT_ROWS
        elements = 2 * self.max_cells * width + rows * (width + _SEGMENT_CELLS) + width
        state_floats = rows * (width + 16) + rows
        num_bytes = elements * self.item_bytes + 4 * (rows * _SEGMENT_CELLS + state_floats)
        return -(-(num_bytes + 8 * _LINE_BYTES) // _LINE_BYTES) * _LINE_BYTES

    def num_bytes(self, max_threads: int) -> int:
        """Returns the memory of so many threads."""
        return max_threads * self.thread_bytes + _LINE_BYTES


class BothWaysScratch:
    """The memory of attention, for up to `max_threads` threads; further threads take no part.
    Operations run one after the other, so all layers of one shape share it."""

    def __init__(self, shape: BothWaysShape, max_threads: int | None = None) -> None:
        self.shape = shape
        self.max_threads = torch.get_num_threads() if max_threads is None else max_threads
        self._memory = torch.zeros(shape.num_bytes(self.max_threads), dtype=torch.uint8)

    @property
    def address(self) -> int:
        """The first thread's memory, on a cache line."""
        return -(-self._memory.data_ptr() // _LINE_BYTES) * _LINE_BYTES

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes


def both_ways_op(
    qkv: Tensor,
    out: Tensor,
    num_rows: Tensor,
    query_starts: Tensor,
    scratch: BothWaysScratch,
    *,
    scale: float,
    reach: int | None = None,
) -> NativeOp:
    """Builds out = `both_ways.attend` of a step's tokens, or of the ones from `first` to `end`, the
    first of which has row 0 of `out` then, and of the heads from `first_head` to `end_head`. If
    keys and values are packed, `out` may be the queries.

    Args:
        qkv: [T, 3 * heads * head_dim]: q, then k, then v, of all heads; rows of unit stride may be
            apart.
        out: [T, heads * head_dim] of qkv's dtype; rows as of qkv.
        num_rows: Rows of the step, int32 [1].
        query_starts: The first token of each row, and the end of the last: int32 [R + 1].
        scratch: Memory of this head_dim and dtype; no row is longer than it says.
        scale: Factor of the scores, above 0.
        reach: Positions that a query sees to either side. None: all.
    """
    assert scale > 0
    shape, size = scratch.shape, out.shape[1]
    assert qkv.dtype == out.dtype
    assert qkv.element_size() == shape.item_bytes
    assert qkv.shape[1] == 3 * size
    assert size % shape.head_dim == 0
    assert qkv.stride(1) == out.stride(1) == 1
    for each in (num_rows, query_starts):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
    args = BothWaysArgs(
        qkv=qkv.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows.data_ptr(),
        query_starts=query_starts.data_ptr(),
        qkv_stride=qkv.stride(0),
        out_stride=out.stride(0),
        num_heads=size // shape.head_dim,
        head_dim=shape.head_dim,
        reach=-1 if reach is None else reach,
        max_cells=shape.max_cells,
        scratch=scratch.address,
        scratch_bytes=shape.thread_bytes,
        max_threads=scratch.max_threads,
        end=1 << 62,
        end_head=size // shape.head_dim,
        scale=scale,
    )
    keep = (qkv, out, num_rows, query_starts, scratch)
    return NativeOp("attend_both_ways_" + dtype_name(qkv.dtype), args, keep)


def pack_op(qkv: Tensor, num_heads: int, count: Tensor) -> NativeOp:
    """Builds a copy of the first tokens' keys and values to packed cells, from `first` on; these
    are said before each run.

    Args:
        qkv: [T, 3 * heads * head_dim], as in `both_ways_op`.
        num_heads: Number of heads.
        count: Number of tokens, int32 [1], read when the program runs.
    """
    assert qkv.stride(1) == 1
    assert count.dtype == torch.int32
    args = PackBothWaysArgs(
        qkv=qkv.data_ptr(),
        count=count.data_ptr(),
        qkv_stride=qkv.stride(0),
        num_heads=num_heads,
        head_dim=qkv.shape[1] // 3 // num_heads,
    )
    return NativeOp("pack_both_ways_" + dtype_name(qkv.dtype), args, (qkv, count))


def attend(
    qkv: Tensor,
    num_heads: int,
    plan: AttentionPlan,
    scale: float,
    reach: int | None = None,
    library: Library | None = None,
) -> Tensor:
    """Runs `both_ways.attend` as a program of its own.

    Args:
        qkv: [T, 3 * heads * head_dim], as in `both_ways_op`.
        num_heads: Number of heads.
        plan: The step's; every row begins at position 0.
        scale: Factor of the scores.
        reach: Positions that a query sees to either side. None: all.
        library: The native kernels. None: the best ones for this processor.

    Returns:
        [T, heads * head_dim] of qkv's dtype.
    """
    library = library or load()
    assert library is not None, "no native kernels here"
    size = qkv.shape[1] // 3
    out = torch.empty(len(qkv), size, dtype=qkv.dtype)
    longest = int(np.diff(plan.host_query_starts).max())
    shape = BothWaysShape(size // num_heads, qkv.element_size(), longest)
    num_rows = torch.tensor([plan.num_rows], dtype=torch.int32)
    scratch = BothWaysScratch(shape)
    library.run(
        both_ways_op(qkv, out, num_rows, plan.query_starts, scratch, scale=scale, reach=reach)
    )
    return out
