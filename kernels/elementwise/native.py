"""The element-wise operations for programs: each builds its arguments at fixed addresses.

Tensors are contiguous, of one dtype (float32 or bfloat16), with at least as many rows as `count`
will ever say. Counts are read when the program runs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name


class _GatherArgs(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


class _RmsNormArgs(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _SwigluArgs(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


def gather_op(source: Tensor, out: Tensor, rows: Tensor, count: Tensor) -> NativeOp:
    """out[i] = source[rows[i]] for i < count: tokens' embeddings, or some rows of a step.

    source: [S, size], out: [N, size], rows: int64 [N], count: int32 [1].
    """
    _check(count, source, out)
    assert source.shape[1] == out.shape[1]
    assert rows.dtype == torch.int64
    args = _GatherArgs(
        source.data_ptr(), out.data_ptr(), rows.data_ptr(), count.data_ptr(), out.shape[1]
    )
    return NativeOp("gather_" + dtype_name(out.dtype), args, (source, out, rows, count))


def rms_norm_op(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    out: Tensor,
    count: Tensor,
    *,
    eps: float,
) -> NativeOp:
    """hidden += delta; out = RMSNorm(hidden) * weight, for the first `count` (int32 [1]) rows."""
    _check(count, hidden, out, weight, delta)
    args = _RmsNormArgs(
        hidden.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        count.data_ptr(),
        hidden.shape[1],
        eps,
    )
    keep = (hidden, delta, weight, out, count)
    return NativeOp("rms_norm_" + dtype_name(hidden.dtype), args, keep)


def swiglu_op(gate_up: Tensor, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """out = silu(gate) * up for the first num_tokens (int32 [1]) rows.

    gate_up: [T, 2 * size], gate first; out: [T, size].
    """
    _check(num_tokens, gate_up, out)
    assert gate_up.shape[1] == 2 * out.shape[1]
    args = _SwigluArgs(gate_up.data_ptr(), out.data_ptr(), num_tokens.data_ptr(), out.shape[1])
    name = "swiglu_" + dtype_name(out.dtype)
    return NativeOp(name, args, (gate_up, out, num_tokens))


def _check(count: Tensor, first: Tensor, *others: Tensor | None) -> None:
    assert count.dtype == torch.int32
    for tensor in (first, *others):
        assert tensor is None or (tensor.dtype == first.dtype and tensor.is_contiguous())
