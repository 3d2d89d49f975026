"""The operations in C++, for programs: each builds its arguments at fixed addresses, over a plan
that is refilled every step."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.lora import LoraPlan, LoraTable
from kernels.lora.native import NativeLoraPlan, PlanArgs
from kernels.native.library import Library, NativeOp, dtype_name, pointer


class _Weights(ctypes.Structure):
    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_weights", ctypes.c_int64),
        ("index", ctypes.c_int64),
    )


class _TokenWeightsArgs(ctypes.Structure):
    _fields_ = (
        ("weights", _Weights),
        ("base", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
        ("offset", ctypes.c_float),
    )


class _EmbeddingsArgs(ctypes.Structure):
    _fields_ = (
        ("weights", _Weights),
        ("out", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


class _LogitsArgs(ctypes.Structure):
    _fields_ = (
        ("weights", _Weights),
        ("plan", PlanArgs),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )


def token_weights_op(
    weight: Tensor,
    out: Tensor,
    table: LoraTable,
    plan: NativeLoraPlan,
    index: int,
    offset: float = 0.0,
) -> NativeOp:
    """out[t] = `reference.token_weights`, for the tokens of the plan.

    weight: [size], of the arena's dtype or fp32; out: [max_tokens, size] of the same.
    """
    assert out.dtype == weight.dtype
    assert weight.dtype in (table.arena.dtype, torch.float32)
    assert out.shape == (plan.max_tokens, len(weight))
    assert out.is_contiguous()
    args = _TokenWeightsArgs(
        weights=_weights(table, index),
        base=weight.data_ptr(),
        out=out.data_ptr(),
        slots=plan.slots.ctypes.data,
        num_tokens=plan.num_tokens.ctypes.data,
        size=len(weight),
        is_wide=weight.dtype != table.arena.dtype,
        offset=offset,
    )
    return NativeOp(f"token_weights_{_dtype(table)}", args, (weight, out, table, plan))


def replace_embeddings_op(
    token_ids: Tensor, out: Tensor, table: LoraTable, plan: NativeLoraPlan, index: int
) -> NativeOp:
    """See `reference.replace_embeddings`. token_ids: int64 [max_tokens]; out: [max_tokens, size] of
    the arena's dtype."""
    assert token_ids.dtype == torch.int64
    assert out.dtype == table.arena.dtype
    assert out.is_contiguous()
    args = _EmbeddingsArgs(
        weights=_weights(table, index),
        out=out.data_ptr(),
        token_ids=token_ids.data_ptr(),
        slots=plan.slots.ctypes.data,
        num_tokens=plan.num_tokens.ctypes.data,
        size=out.shape[1],
    )
    return NativeOp(f"replace_embeddings_{_dtype(table)}", args, (token_ids, out, table, plan))


def replace_logits_op(
    x: Tensor,
    out: Tensor,
    table: LoraTable,
    plan: NativeLoraPlan,
    index: int,
    vocab_size: int,
    bias: Tensor | None = None,
) -> NativeOp:
    """See `reference.replace_logits`. x: [max_tokens, size] of the arena's dtype; out: [max_tokens,
    >= the highest row] of the same, or fp32; bias: fp32 [vocab_size]."""
    assert x.dtype == table.arena.dtype
    assert x.stride(1) == out.stride(1) == 1
    assert out.dtype in (x.dtype, torch.float32)
    assert bias is None or (bias.dtype == torch.float32 and len(bias) == vocab_size)
    args = _LogitsArgs(
        weights=_weights(table, index),
        plan=plan.args(),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        size=x.shape[1],
        out=out.data_ptr(),
        out_stride=out.stride(0),
        vocab_size=vocab_size,
        bias=pointer(bias),
    )
    suffix = "" if out.dtype == x.dtype else "_to_float"
    return NativeOp(f"replace_logits_{_dtype(table)}{suffix}", args, (x, out, table, plan, bias))


def token_weights(
    library: Library,
    weight: Tensor,
    table: LoraTable,
    plan: LoraPlan,
    index: int,
    offset: float = 0.0,
) -> Tensor:
    """Runs `reference.token_weights`: weight [size] -> [T, size]. float32 and bfloat16."""
    out = weight.new_empty(plan.num_tokens, len(weight))
    library.run(token_weights_op(weight, out, table, _native(plan), index, offset))
    return out


def replace_embeddings(
    library: Library, out: Tensor, token_ids: Tensor, table: LoraTable, plan: LoraPlan, index: int
) -> None:
    """Runs `reference.replace_embeddings`: out [T, features], token_ids [T]. float32, bfloat16."""
    library.run(replace_embeddings_op(token_ids, out, table, _native(plan), index))


def replace_logits(
    library: Library,
    out: Tensor,
    x: Tensor,
    table: LoraTable,
    plan: LoraPlan,
    index: int,
    vocab_size: int,
    bias: Tensor | None = None,
) -> None:
    """Runs `reference.replace_logits`: out [T, >= vocab_size], x [T, features], bias fp32
    [vocab_size]. `out` may be float32 with a bfloat16 arena."""
    library.run(replace_logits_op(x, out, table, _native(plan), index, vocab_size, bias))


def _native(plan: LoraPlan) -> NativeLoraPlan:
    native_plan = NativeLoraPlan(plan.num_tokens)
    native_plan.fill(plan.token_slots.tolist())
    return native_plan


def _weights(table: LoraTable, index: int) -> _Weights:
    assert 0 <= index < table.num_weights
    return _Weights(
        arena=table.arena.data_ptr(),
        rows=table.weight_rows.data_ptr(),
        num_weights=table.num_weights,
        index=index,
    )


def _dtype(table: LoraTable) -> str:
    return dtype_name(table.arena.dtype)
