"""The element-wise operations for programs: each builds its arguments at fixed addresses.

Tensors are contiguous, of one dtype (float32 or bfloat16), with at least as many rows as `count`
will ever say. Counts are read when the program runs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name


class _EmbedArgs(ctypes.Structure):
    _fields_ = (
        ("embedding", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


class _RmsNormArgs(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
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


def embed_op(embedding: Tensor, hidden: Tensor, token_ids: Tensor, num_tokens: Tensor) -> NativeOp:
    """hidden[t] = embedding[token_ids[t]] for t < num_tokens.

    embedding: [vocab, size], hidden: [T, size], token_ids: int64 [T], num_tokens: int32 [1].
    """
    _check(num_tokens, embedding, hidden)
    assert token_ids.dtype == torch.int64
    args = _EmbedArgs(
        embedding.data_ptr(),
        hidden.data_ptr(),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        hidden.shape[1],
    )
    keep = (embedding, hidden, token_ids, num_tokens)
    return NativeOp("embed_" + dtype_name(hidden.dtype), args, keep)


def rms_norm_op(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    out: Tensor,
    count: Tensor,
    *,
    eps: float,
    rows: Tensor | None = None,
) -> NativeOp:
    """hidden += delta; out = RMSNorm(hidden) * weight, for the first `count` (int32 [1]) rows.

    With `rows` (int64 [at least count]) row i of `out` is of row `rows[i]`, and `hidden` stays.
    """
    _check(count, hidden, out, weight, delta)
    assert rows is None or rows.dtype == torch.int64
    args = _RmsNormArgs(
        hidden.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        None if rows is None else rows.data_ptr(),
        count.data_ptr(),
        hidden.shape[1],
        eps,
    )
    keep = (hidden, delta, weight, out, rows, count)
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
