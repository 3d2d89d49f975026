"""Mixtures of experts in C++, as operations of a program: each at fixed addresses, over as many
tokens and pairs as the step has when it runs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.experts.reference import MAX_EXPERTS, Choice, Pairs, Scoring, padded_rows
from kernels.linear.native import LinearArgs, linear_args
from kernels.linear.pack import PackedLinear
from kernels.native.library import NativeOp, dtype_name, pointer


class _RouteArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("expert_scales", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_chosen_groups", ctypes.c_int64),
        ("scoring", ctypes.c_int64),
        ("is_normalised", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _SortPairsArgs(ctypes.Structure):
    _fields_ = (
        ("experts", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_pairs", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("first_expert", ctypes.c_int64),
    )


class ExpertsLinearArgs(ctypes.Structure):
    _fields_ = (
        ("linear", LinearArgs),
        ("starts", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
    )


class _CombineArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("shared_logits", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
    )


_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SOFTMAX_OF_CHOSEN)


@dataclass(frozen=True, eq=False, slots=True)
class PairsBuffer:
    """The routing of up to `max_tokens` tokens, which is a step's when `route_op` and
    `sort_pairs_op` have run: see `reference.Routing` and `reference.Pairs`. The pairs may be of
    some experts alone; others' have row -1."""

    experts: Tensor
    """int32 [max_tokens, num_chosen]"""
    weights: Tensor
    """fp32 [max_tokens, num_chosen]"""
    pairs: Pairs
    num_pairs: Tensor
    """int32 [1]"""

    @classmethod
    def allocate(cls, max_tokens: int, num_experts: int, num_chosen: int) -> PairsBuffer:
        """`num_experts` are the ones whose pairs it has."""
        assert num_experts <= MAX_EXPERTS
        shape = (max_tokens, num_chosen)
        pairs = Pairs(
            torch.zeros(max_tokens * num_chosen, dtype=torch.int64),
            torch.zeros(num_experts + 1, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int32),
        )
        num_pairs = torch.zeros(1, dtype=torch.int32)
        return cls(torch.zeros(shape, dtype=torch.int32), torch.zeros(shape), pairs, num_pairs)

    @staticmethod
    def bytes_of(max_tokens: int, num_experts: int, num_chosen: int) -> int:
        """Returns the bytes that `allocate` takes, except for `experts`."""
        return 16 * max_tokens * num_chosen + 4 * (num_experts + 2)

    def with_experts(self, experts: Tensor) -> PairsBuffer:
        """Returns a buffer with other memory for the chosen experts, int32 [max_tokens,
        num_chosen]. It shares the rest, and may be filled when this buffer is no longer needed.
        """
        assert experts.is_contiguous()
        assert experts.shape == self.experts.shape
        assert experts.dtype == self.experts.dtype
        return replace(self, experts=experts)

    @property
    def num_experts(self) -> int:
        return len(self.pairs.starts) - 1


def route_op(
    logits: Tensor,
    choice: Choice,
    out: PairsBuffer,
    count: Tensor,
    bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
) -> NativeOp:
    """Builds `reference.route` for the first `count` rows.

    Args:
        logits: float32 [T, experts], contiguous.
        choice: How experts are chosen and weighed.
        out: Gets the experts and their weights.
        count: Number of tokens, int32 [1], read when the program runs.
        bias: float32 [experts]. None: none.
        expert_scales: float32 [experts]. None: none.
    """
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    num_experts = logits.shape[1]
    assert out.num_experts <= num_experts <= MAX_EXPERTS
    assert out.experts.shape[1] == choice.num_chosen <= num_experts
    for vector in (bias, expert_scales):
        assert vector is None or (vector.dtype == torch.float32 and vector.is_contiguous())
    args = _RouteArgs(
        logits=logits.data_ptr(),
        bias=pointer(bias),
        expert_scales=pointer(expert_scales),
        experts=out.experts.data_ptr(),
        weights=out.weights.data_ptr(),
        count=count.data_ptr(),
        num_experts=num_experts,
        num_chosen=choice.num_chosen,
        num_groups=choice.num_groups,
        num_chosen_groups=choice.num_chosen_groups,
        scoring=_SCORINGS.index(choice.scoring),
        is_normalised=choice.normalised,
        scale=choice.scale,
    )
    return NativeOp("route", args, (logits, out, count, bias, expert_scales))


def sort_pairs_op(out: PairsBuffer, count: Tensor, first_expert: int = 0) -> NativeOp:
    """Builds `reference.sort_pairs` for the experts of the first `count` (int32 [1]) tokens, in
    out.experts [T, num_chosen], and `reference.own_pairs` of the buffer's experts, from
    `first_expert` on."""
    tokens, starts, rows, _ = out.pairs
    args = _SortPairsArgs(
        experts=out.experts.data_ptr(),
        tokens=tokens.data_ptr(),
        starts=starts.data_ptr(),
        rows=rows.data_ptr(),
        num_pairs=out.num_pairs.data_ptr(),
        count=count.data_ptr(),
        num_experts=out.num_experts,
        num_chosen=rows.shape[1],
        first_expert=first_expert,
    )
    return NativeOp("sort_pairs", args, (out, count))


def experts_linear_op(
    x: Tensor, packed: PackedLinear, out: Tensor, routing: PairsBuffer
) -> NativeOp:
    """Builds `reference.experts_linear`.

    Args:
        x: [P, in] of the weights' dtype.
        packed: Weights of all experts below each other, each in whole panels; see `padded_rows`.
        out: [P, out] of the weights' dtype.
        routing: The pairs.
    """
    padded = packed.out_features // routing.num_experts
    assert packed.out_features == routing.num_experts * padded
    assert padded == padded_rows(out.shape[1])
    assert x.dtype == out.dtype == packed.dtype
    linear = linear_args(x, packed, out)
    linear.out_features = out.shape[1]
    args = ExpertsLinearArgs(linear, routing.pairs.starts.data_ptr(), routing.num_experts)
    name = f"linear_experts_{dtype_name(x.dtype)}"
    return NativeOp(name, args, (x, packed, out, routing))


def combine_op(
    x: Tensor,
    routing: PairsBuffer,
    out: Tensor,
    count: Tensor,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
) -> NativeOp:
    """Builds `reference.combine` for the first `count` tokens; pairs of other ranks add nothing.

    Args:
        x: [P, size], contiguous.
        routing: The pairs and their weights.
        out: [T, size] of x's dtype; may be `shared`.
        count: Number of tokens, int32 [1], read when the program runs.
        shared: [T, size] of x's dtype. None: there is none.
        shared_logits: float32 [T, 1]. None: the factor of `shared` is 1.
    """
    for tensor in (out, shared):
        assert tensor is None or (tensor.dtype == x.dtype and tensor.is_contiguous())
    assert x.is_contiguous()
    assert x.shape[1] == out.shape[1]
    assert shared_logits is None or shared_logits.dtype == torch.float32
    rows = routing.pairs.rows
    args = _CombineArgs(
        x=x.data_ptr(),
        rows=rows.data_ptr(),
        weights=routing.weights.data_ptr(),
        shared=pointer(shared),
        shared_logits=pointer(shared_logits),
        out=out.data_ptr(),
        count=count.data_ptr(),
        size=x.shape[1],
        num_chosen=rows.shape[1],
    )
    keep = (x, routing, out, count, shared, shared_logits)
    return NativeOp(f"combine_{dtype_name(x.dtype)}", args, keep)
