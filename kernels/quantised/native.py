"""Products with quantised weights in C++: for programs, at fixed addresses, and over tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.native import ExpertsLinearArgs, PairsBuffer
from kernels.experts.reference import padded_rows
from kernels.linear.native import LinearArgs, linear_args
from kernels.native.library import Library, NativeOp, dtype_name, pointer
from kernels.quantised.formats import Activations, Codes, WeightFormat
from kernels.quantised.pack import PackedQuantised

INT8_CHUNK = 4096
"""Inputs in int8 whose sum of products is whole; as in `src/quantised_int8.cpp`."""
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


class _FormArgs(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("group_size", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("has_offsets", ctypes.c_int64),
    )


class _Int8Inputs(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class _QuantisedArgs(ctypes.Structure):
    _fields_ = (("linear", LinearArgs), ("form", _FormArgs), ("inputs", _Int8Inputs))


class _ExpertsQuantisedArgs(ctypes.Structure):
    _fields_ = (("experts", ExpertsLinearArgs), ("form", _FormArgs), ("inputs", _Int8Inputs))


class _QuantiseInputsArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", _Int8Inputs),
        ("num_tokens", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Int8Inputs:
    """Memory for the inputs of products whose activations are rounded to INT8. A product fills it
    and reads it, so that all products of a program can share it.

    memory: uint8, on 64 bytes.
    """

    memory: Tensor

    @staticmethod
    def bytes_of(max_tokens: int, in_features: int, form: WeightFormat) -> int:
        """Returns the bytes that a product of up to `max_tokens` rows takes."""
        return sum(Int8Inputs._sizes(max_tokens, in_features, form))

    @staticmethod
    def allocate(max_tokens: int, in_features: int, form: WeightFormat) -> Int8Inputs:
        num_bytes = Int8Inputs.bytes_of(max_tokens, in_features, form)
        return Int8Inputs(torch.zeros(num_bytes, dtype=torch.uint8))

    @staticmethod
    def _sizes(max_tokens: int, in_features: int, form: WeightFormat) -> tuple[int, int, int]:
        """Returns the bytes of codes, scales and sums of chunks."""
        padded = -(-in_features // 8) * 8
        size = form.group_size or padded
        chunks = form.num_groups(in_features) * -(-size // INT8_CHUNK)
        return max_tokens * padded, 4 * max_tokens, 4 * max_tokens * chunks

    def _args(self, max_tokens: int, packed: PackedQuantised) -> _Int8Inputs:
        codes, scales, sums = self._sizes(max_tokens, packed.in_features, packed.format)
        assert len(self.memory) >= codes + scales + sums
        address = self.memory.data_ptr()
        return _Int8Inputs(address, address + codes, address + codes + scales)


def quantised_ops(
    x: Tensor,
    packed: PackedQuantised,
    out: Tensor,
    num_tokens: Tensor,
    inputs: Int8Inputs | None = None,
) -> list[NativeOp]:
    """Builds out[t] = x[t] @ weight^T + bias for t < num_tokens.

    Args:
        x: [T, in_features] of the weights' dtype, with rows of unit stride that may be apart.
        packed: The weight and the bias.
        out: [T, out_features] of the weights' dtype or float32; rows as of x.
        num_tokens: int32 [1], read when the program runs.
        inputs: Memory of T rows, if the format rounds activations to INT8.
    """
    assert num_tokens.dtype == torch.int32
    assert out.shape[1] == packed.out_features
    linear = linear_args(x, packed, out)
    linear.num_tokens = num_tokens.data_ptr()
    args = _QuantisedArgs(linear, _form_args(packed))
    ops = []
    if packed.format.activations is Activations.INT8:
        assert inputs is not None
        ops.append(_quantise_inputs_op(x, packed, num_tokens, inputs))
        args.inputs = inputs._args(len(x), packed)
    keep = (x, packed, out, num_tokens, inputs)
    return [*ops, NativeOp(f"quantised_{_name(packed, out)}", args, keep)]


def quantised_experts_ops(
    x: Tensor,
    packed: PackedQuantised,
    out: Tensor,
    routing: PairsBuffer,
    inputs: Int8Inputs | None = None,
) -> list[NativeOp]:
    """Builds `experts.reference.experts_linear` with quantised weights.

    Args:
        x: [P, in] of the weights' dtype.
        packed: Weights of all experts below each other, each in whole panels; see `padded_rows`.
        out: [P, out] of the weights' dtype.
        routing: The pairs.
        inputs: Memory of P rows, if the format rounds activations to INT8.
    """
    padded = packed.out_features // routing.num_experts
    assert packed.out_features == routing.num_experts * padded
    assert padded == padded_rows(out.shape[1])
    assert out.dtype == packed.dtype
    linear = linear_args(x, packed, out)
    linear.out_features = out.shape[1]
    experts = ExpertsLinearArgs(linear, routing.pairs.starts.data_ptr(), routing.num_experts)
    args = _ExpertsQuantisedArgs(experts, _form_args(packed))
    ops = []
    if packed.format.activations is Activations.INT8:
        assert inputs is not None
        ops.append(_quantise_inputs_op(x, packed, routing.num_pairs, inputs))
        args.inputs = inputs._args(len(x), packed)
    keep = (x, packed, out, routing, inputs)
    return [*ops, NativeOp(f"quantised_experts_{_name(packed, out)}", args, keep)]


def _quantise_inputs_op(
    x: Tensor, packed: PackedQuantised, num_tokens: Tensor, inputs: Int8Inputs
) -> NativeOp:
    """Builds `reference.int8_inputs` of the first `num_tokens` rows."""
    args = _QuantiseInputsArgs(
        x.data_ptr(),
        inputs._args(len(x), packed),
        num_tokens.data_ptr(),
        x.stride(0),
        packed.in_features,
        packed.group_size,
    )
    name = f"quantise_inputs_{dtype_name(x.dtype)}"
    return NativeOp(name, args, (x, packed, num_tokens, inputs))


def _name(packed: PackedQuantised, out: Tensor) -> str:
    """Returns an operation's codes and dtypes, such as "nibbles_bf16_float"."""
    own, other = dtype_name(packed.dtype), dtype_name(out.dtype)
    if packed.format.activations is Activations.INT8:
        return f"int8_{other}"
    codes = "fp8" if packed.format.codes is Codes.FP8 else "integers"
    if packed.format.codes.num_bits == 4:
        codes = "nibbles"
    return f"{codes}_{own}" if own == other else f"{codes}_{own}_{other}"


def _form_args(packed: PackedQuantised) -> _FormArgs:
    return _FormArgs(
        pointer(packed.table),
        packed.group_size,
        _SCALES.index(packed.format.scale_dtype),
        packed.format.has_offsets,
    )


def linear(
    library: Library, x: Tensor, packed: PackedQuantised, dtype: torch.dtype | None = None
) -> Tensor:
    """Runs `reference.linear`: x [T, in_features] of the weights' dtype -> [T, out_features] of
    `dtype`, or of x's dtype if it is None."""
    out = torch.empty(len(x), packed.out_features, dtype=dtype or x.dtype)
    inputs = None
    if packed.format.activations is Activations.INT8:
        inputs = Int8Inputs.allocate(len(x), packed.in_features, packed.format)
    count = torch.tensor([len(x)], dtype=torch.int32)
    library.run(*quantised_ops(x, packed, out, count, inputs))
    return out
