"""Products with quantised weights in C++: for programs, at fixed addresses, and over tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.linear.native import LinearArgs
from kernels.native.library import Library, NativeOp, dtype_name, pointer
from kernels.quantised.formats import Codes
from kernels.quantised.pack import PackedQuantised

_SCALES = (torch.float32, torch.bfloat16, torch.float16)


class _FormArgs(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("group_size", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("has_offsets", ctypes.c_int64),
    )


class _QuantisedArgs(ctypes.Structure):
    _fields_ = (("linear", LinearArgs), ("form", _FormArgs))


def quantised_op(x: Tensor, packed: PackedQuantised, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out[t] = x[t] @ weight^T + bias for t < num_tokens, of exact inputs.

    Args:
        x: [T, in_features] of the weights' dtype, with rows of unit stride that may be apart.
        packed: The weight and the bias.
        out: [T, out_features] of the weights' dtype or float32; rows as of x.
        num_tokens: int32 [1], read when the program runs.
    """
    assert num_tokens.dtype == torch.int32
    assert out.shape[1] == packed.out_features
    linear = _linear_args(x, packed, out)
    linear.num_tokens = num_tokens.data_ptr()
    name = f"quantised_{_codes_name(packed)}_{dtype_name(x.dtype)}"
    if out.dtype != x.dtype:
        name += "_" + dtype_name(out.dtype)
    args = _QuantisedArgs(linear, _form_args(packed))
    return NativeOp(name, args, (x, packed, out, num_tokens))


def _codes_name(packed: PackedQuantised) -> str:
    if packed.format.codes.num_bits == 4:
        return "nibbles"
    return "fp8" if packed.format.codes is Codes.FP8 else "integers"


def _form_args(packed: PackedQuantised) -> _FormArgs:
    return _FormArgs(
        pointer(packed.table),
        packed.group_size,
        _SCALES.index(packed.format.scale_dtype),
        packed.format.has_offsets,
    )


def _linear_args(x: Tensor, packed: PackedQuantised, out: Tensor) -> LinearArgs:
    assert x.dtype == packed.dtype
    assert x.shape[1] == packed.in_features
    assert x.stride(1) == out.stride(1) == 1
    return LinearArgs(
        x.data_ptr(),
        packed.weights.data_ptr(),
        pointer(packed.bias),
        out.data_ptr(),
        None,
        x.stride(0),
        out.stride(0),
        packed.in_features,
        packed.out_features,
    )


def linear(
    library: Library, x: Tensor, packed: PackedQuantised, dtype: torch.dtype | None = None
) -> Tensor:
    """Runs `reference.linear`: x [T, in_features] of the weights' dtype -> [T, out_features] of
    `dtype`, or of x's dtype if it is None."""
    out = torch.empty(len(x), packed.out_features, dtype=dtype or x.dtype)
    library.run(quantised_op(x, packed, out, torch.tensor([len(x)], dtype=torch.int32)))
    return out
