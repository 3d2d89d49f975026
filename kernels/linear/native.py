"""The projection in C++: for programs, at fixed addresses, and over tensors."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear.pack import PackedLinear
from kernels.native.library import Library, NativeOp, dtype_name, pointer


class PackedWeight(Protocol):
    """A packed weight [out_features, in_features] that products of `dtype` read."""

    @property
    def weights(self) -> Tensor:
        """[panels, ...]: rows in the order that products read; see the class."""

    @property
    def bias(self) -> Tensor | None:
        """float32 [out_features]."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class LinearArgs(ctypes.Structure):
    """Arguments as operations of other packages take them, too."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


def linear_op(x: Tensor, packed: PackedLinear, out: Tensor, num_tokens: Tensor) -> NativeOp:
    """Builds out[t] = x[t] @ weight^T + bias for t < num_tokens.

    Args:
        x: [T, in_features] of the weights' dtype, with rows of unit stride that may be apart.
        packed: The weight and the bias.
        out: [T, out_features] of the weights' dtype or float32; rows as of x.
        num_tokens: int32 [1], read when the program runs.
    """
    assert num_tokens.dtype == torch.int32
    assert out.shape[1] == packed.out_features
    args = linear_args(x, packed, out)
    args.num_tokens = num_tokens.data_ptr()
    name = "linear_" + dtype_name(x.dtype)
    if out.dtype != x.dtype:
        name += "_" + dtype_name(out.dtype)
    return NativeOp(name, args, (x, packed, out, num_tokens))


def linear_args(x: Tensor, packed: PackedWeight, out: Tensor) -> LinearArgs:
    """Returns the arguments of a product, without a number of tokens. x: [T, in_features] of the
    weights' dtype; out: [T, out_features]. Rows have unit stride.
    """
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
    library: Library, x: Tensor, packed: PackedLinear, dtype: torch.dtype | None = None
) -> Tensor:
    """Runs `reference.linear`: x [T, in_features] of the weights' dtype -> [T, out_features] of
    `dtype`, or of x's dtype if it is None."""
    out = torch.empty(len(x), packed.out_features, dtype=dtype or x.dtype)
    library.run(linear_op(x, packed, out, torch.tensor([len(x)], dtype=torch.int32)))
    return out
