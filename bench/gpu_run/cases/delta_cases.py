"""The operations of a gated delta net, each with its definition in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu_run.cases.family_cases import FamilyCase
from bench.gpu_run.cases.lora_cases import random
from bench.gpu_run.context import Context
from kernels import recurrence
from kernels.recurrence import DeltaHeads, DeviceSegments, Segments, reference

KERNEL, EPS = 4, 1e-6
STATES_BYTES = 2 << 30
"""Maximum bytes of the states that the calls of a measurement pass through, so that no cache holds
them."""


class Operation(NamedTuple):
    """`run` makes all calls of a measurement; `result` computes the first one."""

    run: Callable[[], None]
    result: Callable[[], Tensor]


def channels_of(heads: DeltaHeads) -> int:
    """Returns the elements of q, k and v."""
    return 2 * heads.num_key_heads * heads.key_size + heads.num_value_heads * heads.value_size


@dataclass(frozen=True)
class Net:
    """One layer's inputs, for rows of one segment each, and states for `num_calls` calls."""

    heads: DeltaHeads
    made: Tensor
    qkv: Tensor
    weight: Tensor
    numbers: Tensor
    norm: Tensor
    inputs: Tensor
    states: Tensor
    segments: Segments
    num_calls: int

    @classmethod
    def make(cls, context: Context, lengths: list[int]) -> Net:
        heads, device = context.sizes.delta, context.device
        channels, num_rows = channels_of(heads), len(lengths)
        values = heads.num_value_heads * heads.value_size
        row_bytes = 4 * values * heads.key_size
        most = STATES_BYTES // (row_bytes * (2 * num_rows + 1))
        num_calls = max(1, min(context.sizes.max_calls, most))
        rows = [[(1 + row, 1 + num_rows + row, count)] for row, count in enumerate(lengths)]
        segments = Segments(
            tuple(range(1, 1 + num_rows)),
            tuple(range(1 + num_rows, 1 + 2 * num_rows)),
            tuple(lengths),
            DeviceSegments.build(rows, device),
        )
        slots = 2 * num_rows + 1
        made = random(context, sum(lengths), channels + values + 2 * heads.num_value_heads)
        return cls(
            heads,
            made,
            random(context, sum(lengths), channels),
            random(context, channels, KERNEL).float(),
            random(context, 2, heads.num_value_heads).float(),
            random(context, heads.value_size),
            random(context, slots, KERNEL - 1, channels).float(),
            torch.zeros(num_calls, slots, *heads[1:], device=device),
            segments,
            num_calls,
        )

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """q, k and v; the gates of all heads; b and a."""
        num_values, value_size = self.heads.num_value_heads, self.heads.value_size
        sizes = channels_of(self.heads), num_values * value_size, num_values, num_values
        return self.made.split(sizes, dim=1)

    @property
    def calls(self) -> dict[str, Callable[..., Tensor]]:
        """Each operation by its name: the call of this index, with the kernels or another
        function."""
        return {
            "convolution": self.convolution,
            "delta rule": self.delta_rule,
            "gated norm": self.gated_norm,
            "attention's gate": self.gate_heads,
        }

    def operation(self, name: str) -> Operation:
        call = self.calls[name]

        def run() -> None:
            for index in range(self.num_calls):
                call(index)

        return Operation(run, call)

    def convolution(self, index: int = 0, compute: Callable[..., Tensor] | None = None) -> Tensor:
        compute = compute or recurrence.causal_conv
        return compute(self.parts[0], self.weight, self.inputs, self.segments)

    def delta_rule(self, index: int = 0, compute: Callable[..., Tensor] | None = None) -> Tensor:
        compute = compute or recurrence.delta_rule
        (_, _, b, a), (log_rate, bias) = self.parts, self.numbers
        states = self.states[index]
        return compute(self.qkv, b, a, log_rate, bias, states, self.segments, self.heads)

    def gated_norm(self, index: int = 0, compute: Callable[..., Tensor] | None = None) -> Tensor:
        compute = compute or recurrence.gated_norm
        z = self.parts[1].unflatten(1, (self.heads.num_value_heads, -1))
        return compute(z.clone(), z, self.norm, EPS)

    def gate_heads(self, index: int = 0, compute: Callable[..., Tensor] | None = None) -> Tensor:
        compute = compute or recurrence.gate_heads
        return compute(self.parts[1].clone(), self.parts[1].contiguous())


DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "convolution": reference.causal_conv,
    "delta rule": reference.delta_rule,
    "gated norm": reference.gated_norm,
    "attention's gate": reference.gate_heads,
}


def names(context: Context) -> list[str]:
    return list(_makers(context))


def make(context: Context, name: str) -> FamilyCase:
    return _makers(context)[name](name)


def _makers(context: Context) -> dict[str, Callable[[str], FamilyCase]]:
    rows, tokens = context.sizes.kernel_rows[-1], context.sizes.kernel_tokens[-1]
    return {
        f"{operation} of a delta net, {size}": partial(_case, context, operation, lengths)
        for operation in DEFINITIONS
        for size, lengths in ((f"{rows} rows", [1] * rows), (f"{tokens} tokens", [tokens]))
    }


def _case(context: Context, operation: str, lengths: list[int], name: str) -> FamilyCase:
    net = Net.make(context, lengths)
    run, result = net.operation(operation)
    wanted = partial(net.calls[operation], 0, DEFINITIONS[operation])
    return FamilyCase(name, run, result, wanted, net.num_calls)
