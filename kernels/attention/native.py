"""Attention in C++ (`attention*.cpp` and `rotary.cpp` in `kernels/native/src`), for programs.

Every array of a step lies at a fixed address, and its contents and the counts are read when the
program runs. Tensors are float32 or bfloat16, of the cache's dtype; the cache may hold FP8.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.native_memory import AttentionScratch, AttentionShape, WorkItem
from kernels.attention.plan import AttentionPlan
from kernels.attention.reference import NO_NORMS, HeadNorms
from kernels.native.library import Library, NativeOp, dtype_name, load, pointer


class _KvLayer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("is_tiled", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("page_table_stride", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
    )


class _RotaryAnglesArgs(ctypes.Structure):
    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("axes", ctypes.c_void_p),
        ("axis_stride", ctypes.c_int64),
        ("inverse_frequencies", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class _QueryGrowthArgs(ctypes.Structure):
    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("beta", ctypes.c_float),
    )


class _HeadNorm(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
    )


class _RopeAndStoreArgs(ctypes.Structure):
    _fields_ = (
        ("cache", _KvLayer),
        ("qkv", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("is_interleaved", ctypes.c_int64),
        ("num_keys", ctypes.c_int64),
        ("has_values", ctypes.c_int64),
        ("q_norm", _HeadNorm),
        ("k_norm", _HeadNorm),
        ("v_norm", _HeadNorm),
        ("norms_rotated", ctypes.c_int64),
        ("q_scale", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class _ItemsArgs(ctypes.Structure):
    _fields_ = (
        ("rows", _Rows),
        ("num_kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_queries", ctypes.c_int64),
        ("split_rows", ctypes.c_int64),
        ("max_slots", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_void_p),
    )


class _AttendArgs(ctypes.Structure):
    _fields_ = (
        ("cache", _KvLayer),
        ("rows", _Rows),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("split_rows", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The arrays of `AttentionPlan` at fixed addresses, on the CPU, as large as a step may need.

    `num_rows` and `num_tokens` are int32 [1], `query_starts` int32 [R + 1], `context_lengths`
    int32 [R], `page_table` int32 [R, pages of the longest sequence], `cells` int64 [T]. `ends`, of
    a model whose pictures' tokens see each other, are int32 [T], 0 where a query sees up to its own
    position.
    """

    num_rows: Tensor
    num_tokens: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    page_table: Tensor
    cells: Tensor
    ends: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.ends is None or self.ends.dtype == torch.int32
        for name in ("num_rows", "num_tokens", "query_starts", "context_lengths", "page_table"):
            array = getattr(self, name)
            assert array.dtype == torch.int32, name
            assert array.is_contiguous(), name
        assert self.cells.dtype == torch.int64
        assert self.cells.is_contiguous()

    @classmethod
    def of(cls, plan: AttentionPlan) -> StepRows:
        """Returns the rows of one step's plan."""
        return cls(
            torch.tensor([plan.num_rows], dtype=torch.int32),
            torch.tensor([len(plan.cells)], dtype=torch.int32),
            plan.query_starts,
            plan.context_lengths,
            plan.page_table[plan.table_rows.long()],
            plan.cells,
            plan.ends,
        )


def rotary_angles_op(
    positions: Tensor,
    inverse_frequencies: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_tokens: Tensor,
    axes: Tensor | None = None,
    *,
    scaling: float,
) -> NativeOp:
    """cos, sin of positions[t] * inverse_frequencies, times `scaling`, for t < num_tokens; with
    `axes`, int32 [half], of positions[axes[i], t] * inverse_frequencies[i].

    positions: int64 [T], with axes [any, T], inverse_frequencies: fp32 [half of a head's rotated
    size], cos and sin: [T, half] in the model's dtype, num_tokens: int32 [1].
    """
    assert positions.dtype == torch.int64
    assert positions.is_contiguous()
    assert positions.dim() == (1 if axes is None else 2)
    assert axes is None or (axes.dtype == torch.int32 and axes.is_contiguous())
    assert inverse_frequencies.dtype == torch.float32
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert inverse_frequencies.is_contiguous()
    args = _RotaryAnglesArgs(
        positions.data_ptr(),
        None if axes is None else axes.data_ptr(),
        positions.shape[-1],
        inverse_frequencies.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens.data_ptr(),
        len(inverse_frequencies),
        scaling,
    )
    keep = (positions, axes, inverse_frequencies, cos, sin, num_tokens)
    return NativeOp("rotary_angles_" + dtype_name(cos.dtype), args, keep)


def query_growth_op(
    positions: Tensor, scale: Tensor, num_tokens: Tensor, *, beta: float, length: int
) -> NativeOp:
    """scale[t] = 1 + beta * ln(1 + floor(positions[t] / length)) for t < num_tokens (Llama 4).

    positions: int64 [T], scale: [T] in the model's dtype, num_tokens: int32 [1].
    """
    assert positions.dtype == torch.int64
    args = _QueryGrowthArgs(
        positions.data_ptr(), scale.data_ptr(), num_tokens.data_ptr(), length, beta
    )
    return NativeOp("query_growth_" + dtype_name(scale.dtype), args, (positions, scale, num_tokens))


def rope_and_store_op(
    qkv: Tensor,
    cache: KVCache,
    layer: int,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: StepRows,
    norms: HeadNorms = NO_NORMS,
    *,
    num_heads: int,
    is_interleaved: bool = False,
    q_scale: Tensor | None = None,
) -> NativeOp:
    """Builds the operation of `reference.rotate_and_store` for a step's tokens: q stays in `qkv`, k
    and v go to the tokens' cells.

    Args:
        qkv: [T, size] of the cache's dtype, with rows of unit stride.
        cache: The cache to write to.
        layer: Index of the layer in the cache.
        cos: [T, 1, <= head_dim] of qkv's dtype, as `rotary_angles_op` writes it. None: no rotation.
        sin: As cos.
        rows: The step's rows of tokens.
        norms: Weights of the norms of heads.
        num_heads: Number of query heads.
        is_interleaved: As in `reference.rotate`.
        q_scale: [T] of qkv's dtype. None: 1.
    """
    assert qkv.dtype == cache.dtype
    for each in (cos, q_scale):
        assert each is None or each.dtype == qkv.dtype
    assert qkv.stride(1) == 1
    stored = qkv.shape[1] // cache.head_dim - num_heads
    num_kv_heads = cache.num_kv_heads
    assert stored in (0, num_kv_heads, 2 * num_kv_heads)
    args = _RopeAndStoreArgs(
        _kv_layer(cache, layer),
        qkv.data_ptr(),
        qkv.stride(0),
        num_heads,
        0 if cos is None else cos.shape[1],
        pointer(cos),
        pointer(sin),
        is_interleaved,
        min(stored, num_kv_heads),
        stored > num_kv_heads,
        _head_norm(norms.q, qkv.dtype, num_heads, cache.head_dim),
        _head_norm(norms.k, qkv.dtype, num_kv_heads, cache.head_dim),
        _head_norm(norms.v, qkv.dtype, num_kv_heads, cache.head_dim),
        norms.are_rotated,
        pointer(q_scale),
        rows.cells.data_ptr(),
        rows.num_tokens.data_ptr(),
        norms.eps,
    )
    keep = (qkv, cache, cos, sin, rows, norms, q_scale)
    return NativeOp("rope_and_store_" + _types_name(cache), args, keep)


def rotate_op(
    qk: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_tokens: Tensor,
    *,
    head_dim: int,
    is_interleaved: bool = False,
) -> NativeOp:
    """Builds qk = `reference.rotate` of each of its heads, in place, for the first tokens.

    Args:
        qk: [T, heads * head_dim]: queries and keys, with rows of unit stride that may be apart.
        cos: [T, <= head_dim / 2] of qk's dtype, as `rotary_angles_op` writes it.
        sin: As cos.
        num_tokens: Number of tokens, int32 [1], read when the program runs.
        head_dim: Size of a head.
        is_interleaved: As in `reference.rotate`.
    """
    assert qk.dtype == cos.dtype == sin.dtype
    assert qk.stride(1) == 1
    none = _HeadNorm(None, 0, 0, 0)
    args = _RopeAndStoreArgs(
        cache=_KvLayer(head_dim=head_dim),
        qkv=qk.data_ptr(),
        row_stride=qk.stride(0),
        num_heads=qk.shape[1] // head_dim,
        half=cos.shape[1],
        cos=pointer(cos),
        sin=pointer(sin),
        is_interleaved=is_interleaved,
        has_values=True,
        q_norm=none,
        k_norm=none,
        v_norm=none,
        num_tokens=num_tokens.data_ptr(),
    )
    return NativeOp("rope_and_store_" + dtype_name(qk.dtype), args, (qk, cos, sin, num_tokens))


def _head_norm(
    weight: Tensor | None, dtype: torch.dtype, num_heads: int, head_dim: int
) -> _HeadNorm:
    if weight is None:
        return _HeadNorm(None, 0, 0, 0)
    size, stride = weight.shape[-1], weight.stride(0) if weight.dim() > 1 else 0
    assert size in (head_dim, num_heads * head_dim)
    assert weight.dtype in (dtype, torch.float32)
    return _HeadNorm(pointer(weight), size, stride, weight.dtype != dtype)


@dataclass(frozen=True, eq=False, slots=True)
class NativeAttention:
    """Attention of one program's steps under one window: `items_op` once per step, before the
    first `attend_op`, and one `attend_op` per layer. The scratch memory is of the cache's shape."""

    cache: KVCache
    rows: StepRows
    scratch: AttentionScratch
    window: int | None = None
    _items: ctypes.Array[WorkItem] = field(init=False)
    _num_items: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, rows = self.scratch.shape, self.rows
        assert shape == AttentionShape.of(self.cache, shape.num_heads)
        num_items = shape.max_items(
            len(rows.cells), len(rows.context_lengths), self.scratch.max_threads
        )
        object.__setattr__(self, "_items", (WorkItem * num_items)())
        object.__setattr__(self, "_num_items", torch.zeros(1, dtype=torch.int32))

    @property
    def num_items(self) -> int:
        """Items into which the step was cut."""
        return int(self._num_items)

    @property
    def max_items(self) -> int:
        return len(self._items)

    def items_op(self) -> NativeOp:
        """Cuts the step into work items."""
        shape = self.scratch.shape
        args = _ItemsArgs(
            self._rows_args,
            shape.num_kv_heads,
            shape.group,
            self.window or 0,
            shape.block_rows,
            shape.block_queries,
            shape.split_rows,
            len(self.scratch.arrived),
            ctypes.addressof(self._items),
            self._num_items.data_ptr(),
        )
        return NativeOp("attention_items", args, self)

    def attend_op(
        self,
        q: Tensor,
        out: Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> NativeOp:
        """out = `reference.attend` for the step's tokens.

        q and out: [T, at least num_heads * head_dim] with unit stride in the last dimension; the
        heads lie at the start of each row. sinks: float32 [num_heads].
        """
        assert q.dtype == out.dtype == self.cache.dtype
        assert q.stride(1) == out.stride(1) == 1
        scratch, shape = self.scratch, self.scratch.shape
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert sinks.shape == (shape.num_heads,)
        args = _AttendArgs(
            _kv_layer(self.cache, layer),
            self._rows_args,
            q.data_ptr(),
            out.data_ptr(),
            q.stride(0),
            out.stride(0),
            shape.group,
            self.window or 0,
            shape.block_rows,
            shape.split_rows,
            ctypes.addressof(self._items),
            self._num_items.data_ptr(),
            scratch.arrived.data_ptr(),
            scratch.partials.data_ptr(),
            -(-scratch.threads.data_ptr() // 64) * 64,
            shape.thread_bytes,
            scratch.max_threads,
            pointer(sinks),
            scale,
            softcap or 0.0,
        )
        return NativeOp("attend_" + _types_name(self.cache), args, (self, q, out, sinks))

    @property
    def num_bytes(self) -> int:
        """Of work items; the scratch memory counts by itself."""
        return ctypes.sizeof(self._items) + self._num_items.nbytes

    @property
    def _rows_args(self) -> _Rows:
        rows = self.rows
        return _Rows(
            rows.num_rows.data_ptr(),
            rows.query_starts.data_ptr(),
            rows.context_lengths.data_ptr(),
            rows.page_table.data_ptr(),
            rows.page_table.shape[1],
            pointer(rows.ends),
        )


def attend(
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    library: Library | None = None,
) -> Tensor:
    """Runs `reference.attend` as a program of its own: q [T, num_heads, head_dim] and sinks float32
    [num_heads] give [T, num_heads, head_dim]. q may be a strided view with unit stride in a token's
    heads. `library` None: the best one for this processor."""
    library = library or load()
    assert library is not None, "no native kernels here"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    scratch = AttentionScratch(AttentionShape.of(cache, q.shape[1]))
    attention = NativeAttention(cache, StepRows.of(plan), scratch, window)
    heads = q.flatten(1) if len(q) == 0 else q.as_strided((len(q), q[0].numel()), (q.stride(0), 1))
    attend_op = attention.attend_op(
        heads, out.flatten(1), layer, scale=scale, softcap=softcap, sinks=sinks
    )
    library.run(attention.items_op(), attend_op)
    return out


def _types_name(cache: KVCache) -> str:
    """Returns the ending of the names of operations on a cache: of its storage and its dtype."""
    return ("" if cache.scales is None else "fp8_") + dtype_name(cache.dtype)


def _kv_layer(cache: KVCache, layer: int) -> _KvLayer:
    assert cache.data.device.type == "cpu"
    return _KvLayer(
        cache.data[layer].data_ptr(),
        cache.page_size,
        cache.num_kv_heads,
        cache.head_dim,
        cache.head_bytes,
        cache.is_tiled,
    )
