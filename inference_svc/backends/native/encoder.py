"""The operations of encoders in a native program, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from inference_svc.backends.base import max_pages
from inference_svc.backends.native.adapter_ops import GroupedOp
from inference_svc.backends.native.buffers import StepArrays
from inference_svc.core import BatchRow, EngineConfig
from inference_svc.model.description import Activation, BothWays, Decoder
from inference_svc.model.encoder.operations import Activate, AddInputs, AttendBothWays
from inference_svc.model.inputs import token_types
from inference_svc.model.operations import Value
from kernels.attention.native import rotate_op
from kernels.attention.native_both_ways import BothWaysScratch, BothWaysShape, both_ways_op
from kernels.elementwise import add_rows_op, gelu_op, gelu_tanh_op, silu_op

_ACTIVATE = {
    Activation.SILU: silu_op,
    Activation.GELU_TANH: gelu_tanh_op,
    Activation.GELU: gelu_op,
}


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

    def add_inputs(self, op: AddInputs, at: Mapping[Value, Tensor]) -> Iterator[GroupedOp]:
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

    def attend(self, op: AttendBothWays, at: Mapping[Value, Tensor]) -> Iterator[GroupedOp]:
        mixer, step, qkv = op.mixer, self._step, at[op.inputs[0]]
        if op.angles is not None:
            cos, sin = at[op.angles].view(2, len(step.positions), -1)
            qk = qkv[:, : 2 * mixer.size]
            yield "", rotate_op(qk, cos, sin, step.num_tokens, head_dim=mixer.head_dim)
        rows, scratch = step.rows, self._scratches[mixer.head_dim]
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

    def activate(self, op: Activate, at: Mapping[Value, Tensor]) -> Iterator[GroupedOp]:
        made = _ACTIVATE[op.activation](at[op.inputs[0]], at[op.out], self._step.num_tokens)
        yield "", made


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
