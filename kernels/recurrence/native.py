"""Recurrences in C++, as operations of a program: each at fixed addresses, over as many rows as the
step has when it runs.

Tensors are contiguous, unless it says otherwise, of one dtype (float32 or bfloat16).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.library import NativeOp, dtype_name
from kernels.recurrence.reference import MAX_KERNEL, MAX_KEY_SIZE, DeltaHeads


class _StateRows(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
    )


class _CopyRunsArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class _GateHeadsArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


class _CausalConvArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("rows", _StateRows),
        ("channels", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


class _DeltaRuleArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rate", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("rows", _StateRows),
        ("num_key_heads", ctypes.c_int64),
        ("num_value_heads", ctypes.c_int64),
        ("key_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


class _GatedNormArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, eq=False, slots=True)
class StateRows:
    """The rows of a step: row r has the segments from firsts[r] to firsts[r + 1]; segment s has the
    tokens from starts[s] to starts[s + 1], and reads and writes the state in these slots, one
    segment of a row after the other. `num_rows` is int32 [1], the others int32."""

    num_rows: Tensor
    firsts: Tensor
    starts: Tensor
    read: Tensor
    written: Tensor

    @property
    def args(self) -> _StateRows:
        return _StateRows(
            self.num_rows.data_ptr(),
            self.firsts.data_ptr(),
            self.starts.data_ptr(),
            self.read.data_ptr(),
            self.written.data_ptr(),
        )


def copy_runs_op(
    x: Tensor, out: Tensor, num_tokens: Tensor, runs: Sequence[tuple[int, int, int]]
) -> NativeOp:
    """Copies runs of columns: (where they are in x, where they go in out, how many).

    x: [T, columns], out: [T, others], num_tokens: int32 [1].
    """
    table = torch.tensor(runs, dtype=torch.int64)
    args = _CopyRunsArgs(
        x=x.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        runs=table.data_ptr(),
        num_runs=len(runs),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    return NativeOp("copy_runs_" + dtype_name(out.dtype), args, (x, out, num_tokens, table))


def gate_heads_op(x: Tensor, gate: Tensor, num_tokens: Tensor) -> NativeOp:
    """x *= sigmoid(gate). Both: [T, size] of one float dtype. num_tokens: int32 [1]."""
    assert x.is_contiguous()
    assert gate.is_contiguous()
    args = _GateHeadsArgs(x.data_ptr(), gate.data_ptr(), num_tokens.data_ptr(), x.shape[1])
    return NativeOp("gate_heads_" + dtype_name(x.dtype), args, (x, gate, num_tokens))


def causal_conv_op(
    x: Tensor, out: Tensor, weight: Tensor, states: Tensor, rows: StateRows
) -> NativeOp:
    """See `reference.causal_conv`. x: [T, channels] of unit stride in its rows, out: [T, channels],
    both of one float dtype; weight: fp32 [channels, size], states: fp32 [slots, size - 1,
    channels]."""
    return _conv_op("causal_conv", x, out, weight, states, rows)


def gated_conv_op(
    x: Tensor, out: Tensor, weight: Tensor, states: Tensor, rows: StateRows
) -> NativeOp:
    """See `reference.gated_conv`. x: [T, 3 * channels] of unit stride in its rows, the others as
    for `causal_conv_op`."""
    return _conv_op("gated_conv", x, out, weight, states, rows)


def _conv_op(
    name: str, x: Tensor, out: Tensor, weight: Tensor, states: Tensor, rows: StateRows
) -> NativeOp:
    channels, size = weight.shape
    assert size <= MAX_KERNEL
    assert states.shape[1:] == (size - 1, channels)
    assert out.is_contiguous()
    by_place = weight.t().contiguous()
    args = _CausalConvArgs(
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=by_place.data_ptr(),
        states=states.data_ptr(),
        rows=rows.args,
        channels=channels,
        size=size,
        stride=x.stride(0),
    )
    return NativeOp(f"{name}_{dtype_name(x.dtype)}", args, (x, out, by_place, states, rows))


def delta_rule_op(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
    rate: Tensor,
    bias: Tensor,
    states: Tensor,
    rows: StateRows,
    heads: DeltaHeads,
) -> NativeOp:
    """See `reference.gated_delta`, whose beta is sigmoid(b), and whose decay is rate * softplus(a +
    bias).

    qkv: [T, q, k and v of all heads]; b, a: [T, value heads], of unit stride in their rows; out:
    [T, value heads * value size]; rate, bias: fp32 [value heads]; states: fp32 [slots, value heads,
    key size, value size].
    """
    assert heads.key_size <= MAX_KEY_SIZE
    assert qkv.is_contiguous()
    assert out.is_contiguous()
    assert rate.dtype == bias.dtype == torch.float32
    assert b.stride() == a.stride()
    args = _DeltaRuleArgs(
        qkv=qkv.data_ptr(),
        b=b.data_ptr(),
        a=a.data_ptr(),
        out=out.data_ptr(),
        rate=rate.data_ptr(),
        bias=bias.data_ptr(),
        states=states.data_ptr(),
        rows=rows.args,
        num_key_heads=heads.num_key_heads,
        num_value_heads=heads.num_value_heads,
        key_size=heads.key_size,
        value_size=heads.value_size,
        stride=b.stride(0),
    )
    keep = (qkv, b, a, out, rate, bias, states, rows)
    return NativeOp("delta_rule_" + dtype_name(out.dtype), args, keep)


def gated_norm_op(
    x: Tensor, gate: Tensor, weight: Tensor, num_tokens: Tensor, *, eps: float
) -> NativeOp:
    """See `reference.gated_norm`, in place. x: [T, heads * size]; gate: as x, of unit stride in its
    rows; weight: [size], or [T, size] for each token, of x's float dtype. num_tokens: int32 [1]."""
    assert x.is_contiguous()
    assert weight.dtype == x.dtype
    size = weight.shape[-1]
    args = _GatedNormArgs(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        weight=weight.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        num_heads=x.shape[1] // size,
        size=size,
        gate_stride=gate.stride(0),
        weight_stride=weight.stride(0) if weight.dim() == 2 else 0,
        eps=eps,
    )
    return NativeOp("gated_norm_" + dtype_name(x.dtype), args, (x, gate, weight, num_tokens))
