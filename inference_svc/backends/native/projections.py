"""Projections as native kernels read them: packed, plain or in few bits, and the operations that
compute with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from inference_svc.model.description import WeightPart
from inference_svc.model.layers import part_of, rows_of
from inference_svc.model.quantised.scheme import Rows
from kernels.experts.native import PairsBuffer, experts_linear_op
from kernels.host_memory import allocate_host
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import NativeOp
from kernels.quantised.native import Int8Inputs, quantised_experts_ops, quantised_ops
from kernels.quantised.pack import PackedQuantised

Part: TypeAlias = PackedLinear | PackedQuantised


@dataclass(frozen=True, eq=False, slots=True)
class PackedProjection:
    """A projection whose outputs are those of its parts, side by side.

    bias: fp32 [out]; each part has its range of it.
    """

    parts: tuple[Part, ...]
    bias: Tensor | None

    def put_rows(self, start: int, rows: Rows) -> None:
        """Packs rows [N, in] as those from `start` on, which are all of one part."""
        part, first = part_of(self.parts, start)
        part.put_rows(start - first, rows)

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N], of one part, as those from `start` on."""
        part, first = part_of(self.parts, start)
        part.put_bias(start - first, values)

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight in the model's dtype, [end - start, in]."""
        return rows_of(self.parts, start, end)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class PackedProjections:
    """Makes projections that are packed as their rows are read. `allocate` gives zeroed bytes,
    uint8, on 64 bytes."""

    allocate: Callable[[int], Tensor] = allocate_host

    def empty(
        self,
        parts: Sequence[WeightPart],
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedProjection:
        """Returns one whose rows are zero until they are put."""
        assert device.type == "cpu"
        bias = torch.zeros(sum(part.num_rows for part in parts)) if has_bias else None
        made: list[Part] = []
        first = 0
        for part in parts:
            end = first + part.num_rows
            own = self._empty(part, in_features, dtype)
            made.append(own if bias is None else replace(own, bias=bias[first:end]))
            first = end
        return PackedProjection(tuple(made), bias)

    def _empty(self, part: WeightPart, in_features: int, dtype: torch.dtype) -> Part:
        if part.format is None:
            return PackedLinear.empty(
                part.num_rows, in_features, has_bias=False, dtype=dtype, allocate=self.allocate
            )
        return PackedQuantised.empty(
            part.num_rows,
            in_features,
            has_bias=False,
            dtype=dtype,
            form=part.format,
            allocate=self.allocate,
        )

    def of(self, weight: Tensor) -> PackedProjection:
        """Returns a packed copy of a weight [out, in], bf16 or fp32, because a packed weight cannot
        be shared."""
        return PackedProjection((PackedLinear.pack(weight, allocate=self.allocate),), None)


def project_ops(
    x: Tensor,
    projection: PackedProjection,
    out: Tensor,
    count: Tensor,
    inputs: Int8Inputs,
) -> Iterator[NativeOp]:
    """Yields the operations of out[t] = x[t] @ weight^T + bias for t < count.

    Args:
        x: [T, in] of the weights' dtype.
        projection: The weight and the bias.
        out: [T, out] of the weights' dtype or fp32.
        count: Number of tokens, int32 [1], read when the program runs.
        inputs: Memory for inputs in int8, which operations share.
    """
    first = 0
    for part in projection.parts:
        own = out[:, first : first + part.out_features]
        if isinstance(part, PackedQuantised):
            yield from quantised_ops(x, part, own, count, inputs)
        else:
            yield linear_op(x, part, own, count)
        first += part.out_features


def experts_ops(
    x: Tensor,
    projection: PackedProjection,
    out: Tensor,
    routing: PairsBuffer,
    inputs: Int8Inputs,
) -> Iterator[NativeOp]:
    """Yields the operations of pairs, each by its expert's weight; see `experts_linear_op`.

    Args:
        x: [P, in], a row for each pair, in the model's dtype.
        projection: The weights of all experts, one part.
        out: [P, out], overwritten.
        routing: The pairs of a step.
        inputs: Buffers for rows that are rounded to INT8.
    """
    [part] = projection.parts
    if isinstance(part, PackedQuantised):
        yield from quantised_experts_ops(x, part, out, routing, inputs)
    else:
        yield experts_linear_op(x, part, out, routing)
