"""The operations of encoders in a native program, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from inference_svc.backends.base import max_pages
from inference_svc.backends.native.adapter_ops import GroupedOp
from inference_svc.backends.native.buffers import StepArrays
from inference_svc.core import BatchRow, EngineConfig
from inference_svc.model.description import Activation, BothWays, Decoder
from inference_svc.model.encoder.operations import (
    Activate,
    AddInputs,
    AttendBothWays,
    RotateHeads,
)
from inference_svc.model.inputs import token_types
from inference_svc.model.operations import Op, Value
from kernels.attention.native import rotate_op
from kernels.attention.native_both_ways import BothWaysScratch, BothWaysShape, both_ways_op
from kernels.elementwise import add_rows_op, gelu_op, gelu_tanh_op, quick_gelu_op, silu_op
from kernels.native.library import NativeOp

_ACTIVATE = {
    Activation.SILU: silu_op,
    Activation.GELU_TANH: gelu_tanh_op,
    Activation.GELU: gelu_op,
    Activation.QUICK_GELU: quick_gelu_op,
}


Tensors: TypeAlias = Mapping[Value, Tensor]


class EncoderOps(Protocol):
    """Makes the operations that encoders of texts and towers have."""

    def add_inputs(self, op: AddInputs, at: Tensors) -> Iterator[GroupedOp]: ...

    def rotate(self, op: RotateHeads, at: Tensors) -> Iterator[GroupedOp]: ...

    def attend(self, op: AttendBothWays, at: Tensors) -> Iterator[GroupedOp]: ...

    def activate(self, op: Activate, at: Tensors) -> Iterator[GroupedOp]: ...


class NativeEncoder:
    """Makes operations over the arrays of a `step` and the model's `tables`. Layers whose heads
    have one size share their workspace."""

    def __init__(
        self,
        decoder: Decoder,
        tables: Mapping[str, Tensor],
        step: StepArrays,
        dtype: torch.dtype,
    ) -> None:
        self._tables, self._step = tables, step
        self._types: Tensor | None = None
        self._num_typed = 0
        if _has_types(decoder):
            self._types = torch.zeros(len(step.positions), dtype=torch.int64)
        longest = step.rows.page_table.shape[1] * step.page_size
        self._scratches = {
            shape.head_dim: BothWaysScratch(shape) for shape in _shapes(decoder, longest, dtype)
        }

    @property
    def num_bytes(self) -> int:
        of_types = 0 if self._types is None else self._types.nbytes
        return of_types + sum(each.num_bytes for each in self._scratches.values())

    def fill(self, rows: Sequence[BatchRow]) -> None:
        """Writes the types of a step's tokens, if the model has several."""
        if self._types is None:
            return
        types = token_types(rows)
        self._types[: self._num_typed] = 0
        self._num_typed = 0 if types is None else len(types)
        if types is not None:
            self._types[: self._num_typed] = torch.from_numpy(types)

    def add_inputs(self, op: AddInputs, at: Tensors) -> Iterator[GroupedOp]:
        rows = None if op.types is None else self._tables[op.types.key]
        table = None if op.positions is None else self._tables[op.positions.key]
        made = add_rows_op(
            at[op.out],
            rows,
            self._types,
            table,
            self._step.positions,
            self._step.num_tokens,
            first_row=op.first_row,
        )
        yield "", made

    def rotate(self, op: RotateHeads, at: Tensors) -> Iterator[GroupedOp]:
        yield "", rotate_heads_op(op, at, self._step.num_tokens)

    def attend(self, op: AttendBothWays, at: Tensors) -> Iterator[GroupedOp]:
        mixer, qkv = op.mixer, at[op.inputs[0]]
        rows, scratch = self._step.rows, self._scratches[mixer.head_dim]
        made = both_ways_op(
            qkv,
            at[op.out],
            rows.num_rows,
            rows.query_starts,
            scratch,
            scale=mixer.scale,
            reach=mixer.reach,
        )
        yield "", made

    def activate(self, op: Activate, at: Tensors) -> Iterator[GroupedOp]:
        yield "", activate_op(op, at, self._step.num_tokens)


def rotate_heads_op(op: RotateHeads, at: Tensors, count: Tensor) -> NativeOp:
    """Returns a rotation of queries and keys of so many rows."""
    (cos, sin), mixer = angles_of(at[op.inputs[1]]), op.mixer
    return rotate_op(at[op.out][:, : 2 * mixer.size], cos, sin, count, head_dim=mixer.head_dim)


def angles_of(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [T, half], one after the other in memory."""
    cos, sin = angles.view(2, len(angles), -1)
    return cos, sin


def activate_op(op: Activate, at: Tensors, count: Tensor) -> NativeOp:
    """Returns an activation of so many rows."""
    return _ACTIVATE[op.activation](at[op.inputs[0]], at[op.out], count)


def encoder_bytes(config: EngineConfig, decoder: Decoder, num_threads: int) -> int:
    """Returns the memory of a `NativeEncoder` with so many threads."""
    longest, dtype = max_pages(config) * config.page_size, getattr(torch, config.dtype)
    of_types = config.max_batch_tokens * torch.int64.itemsize if _has_types(decoder) else 0
    return of_types + sum(each.num_bytes(num_threads) for each in _shapes(decoder, longest, dtype))


def _has_types(decoder: Decoder) -> bool:
    return decoder.encoder is not None and decoder.encoder.num_token_types > 1


def _shapes(decoder: Decoder, longest: int, dtype: torch.dtype) -> Iterator[BothWaysShape]:
    mixers = (block.mixer for block in decoder.blocks)
    sizes = {each.head_dim for each in mixers if isinstance(each, BothWays)}
    return (BothWaysShape(size, dtype.itemsize, longest) for size in sorted(sizes))


MAKE_ENCODERS: Mapping[type[Op], Callable[[EncoderOps, Any, Tensors], Iterator[GroupedOp]]] = {
    Activate: lambda own, op, at: own.activate(op, at),
    AddInputs: lambda own, op, at: own.add_inputs(op, at),
    AttendBothWays: lambda own, op, at: own.attend(op, at),
    RotateHeads: lambda own, op, at: own.rotate(op, at),
}
"""The function that makes each kind of operation that encoders of texts and towers have."""
