"""The memory that a program of native operations computes in: values share it that are not needed
at the same time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.core import EngineConfig
from inference_svc.model.description import Decoder
from inference_svc.model.encoder.clips import Clip, Join
from inference_svc.model.encoder.operations import (
    Activate,
    ArrangeHeads,
    AttendBothWays,
    RotateHeads,
)
from inference_svc.model.encoder.towers import outputs_of
from inference_svc.model.lifetimes import ValueSizes, last_uses
from inference_svc.model.operations import (
    AddNorm,
    Attend,
    Gate,
    Gather,
    HandOn,
    Logits,
    NormBySums,
    Op,
    Operations,
    Project,
    ProjectExperts,
    Receive,
    RotateAndStore,
    Rows,
    SumRanks,
    SumSquares,
    Value,
)
from inference_svc.model.walk import Narrowing, operations
from kernels.host_memory import allocate_host, row_stride
from kernels.quantised import Activations
from kernels.quantised.native import Int8Inputs

_ALIGNMENT = 64


class Placed(NamedTuple):
    """The offset of every value that an operation reads or writes, by operation; the bytes of all;
    and the values whose rows are apart."""

    offsets: tuple[Mapping[Value, int], ...]
    num_bytes: int
    spaced: frozenset[Value]


def place(
    ops: Sequence[Op], sizes: ValueSizes, kept: Collection[Value], apart: Collection[Value]
) -> Placed:
    """Places each value, from its first write to its last use, at the lowest offset where nothing
    else is. Values that are `kept` stay to the end; these `apart` have memory of their own."""
    live: dict[Value, tuple[int, int]] = {}
    offsets, total = [], 0
    spaced = _spaced(ops)
    for op, ended in zip(ops, last_uses(ops, kept), strict=True):
        if op.out not in live and op.out not in apart:
            num_bytes = sizes.num_bytes(op.out)
            if op.out in spaced:
                item_bytes = sizes.dtype_of(op.out).itemsize
                num_bytes = sizes.rows(op.out) * row_stride(op.out.width, item_bytes) * item_bytes
            size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            live[op.out] = _gap(live.values(), size)
            total = max(total, live[op.out][1])
        offsets.append({each: live[each][0] for each in (*op.inputs, op.out) if each in live})
        for value in ended:
            live.pop(value, None)
    return Placed(tuple(offsets), total, spaced)


def _spaced(ops: Sequence[Op]) -> frozenset[Value]:
    """Returns the values of tokens whose rows all operations take with a stride."""
    touched: set[Value] = set()
    dense: set[Value] = set()
    for op in ops:
        values = {*op.inputs, op.out}
        touched |= {each for each in values if each.rows is Rows.TOKENS}
        dense |= values.difference(_strided(op))
    return frozenset(touched - dense)


def _strided(op: Op) -> tuple[Value | None, ...]:
    """Returns the values that an operation takes with a stride."""
    match op:
        case Project() | Gate() | Activate() | Clip() | Join():
            return (*op.inputs, op.out)
        case AddNorm():
            return (op.delta, None if op.out == op.hidden else op.out)
        case Attend() | AttendBothWays():
            return (op.inputs[0], op.out)
        case RotateHeads() | ArrangeHeads() | RotateAndStore():
            return (op.out,)
        case SumRanks() | NormBySums() | Receive() | HandOn():
            return (op.out,)
        case Gather() | Logits() | SumSquares():
            return (op.inputs[0],)
    return ()


def _gap(taken: Collection[tuple[int, int]], size: int) -> tuple[int, int]:
    """Returns the lowest range of this size that touches none of the taken ones."""
    start = 0
    for other_start, other_end in sorted(taken):
        if other_start - start >= size:
            break
        start = max(start, other_end)
    return start, start + size


@dataclass(frozen=True, slots=True)
class Workspace:
    """Values of steps: of whole ones, which go on with the tokens that get logits behind the mixer
    of the last layer, and of such that have the layers and the head apart.

    `logits` are fp32 [max_logits, vocab_size, and tokens that adapters may add]; [0, ...] where
    other ranks have them. `int8_inputs` is for the inputs of a product that the format of its
    weight rounds to INT8. Values are `taken` out of a tower's steps.
    """

    sizes: ValueSizes
    flat: Tensor
    logits: Tensor
    int8_inputs: Int8Inputs
    taken: tuple[Value, ...] = ()

    @classmethod
    def allocate(
        cls,
        decoder: Decoder,
        max_tokens: int,
        max_logits: int,
        dtype: torch.dtype,
        max_added_tokens: int = 0,
    ) -> Workspace:
        sizes = ValueSizes.of(decoder, max_tokens, max_logits, dtype)
        flat = allocate_host(_values_bytes(decoder, sizes))
        vocab_size = decoder.vocab_size + max_added_tokens
        logits = allocate_host(_logits_bytes(decoder, max_logits, vocab_size)).view(torch.float32)
        inputs = Int8Inputs(allocate_host(_int8_bytes(decoder, sizes)))
        shape = logits.numel() // max(vocab_size, 1), vocab_size
        return cls(sizes, flat, logits.view(shape), inputs, _taken(decoder))

    def tensors(self, found: Operations, *, is_apart: bool) -> Iterator[Mapping[Value, Tensor]]:
        """Yields the tensors of each operation, [rows, width], but the logits; rows may be apart.
        If the head runs `is_apart`, as often as it must, the values that it reads stay."""
        placed = _placed(found, self.sizes, self.taken, is_apart=is_apart)
        for offsets in placed.offsets:
            yield {
                value: self._tensor(value, start, is_spaced=value in placed.spaced)
                for value, start in offsets.items()
            }

    def _tensor(self, value: Value, start: int, *, is_spaced: bool) -> Tensor:
        dtype, rows = self.sizes.dtype_of(value), self.sizes.rows(value)
        stride = row_stride(value.width, dtype.itemsize) if is_spaced else value.width
        end = start + rows * stride * dtype.itemsize
        return self.flat[start:end].view(dtype).view(rows, stride)[:, : value.width]

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes + self.logits.nbytes + self.int8_inputs.memory.nbytes


def max_outputs(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the most tokens of a step whose outputs are computed at once: one of each sequence,
    and of an encoder all, because it has next to nothing behind its layers."""
    return config.max_sequences if decoder.encoder is None else config.max_batch_tokens


def workspace_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the bytes of the workspace of an engine with this config."""
    dtype, max_logits = getattr(torch, config.dtype), max_outputs(config, decoder)
    sizes = ValueSizes.of(decoder, config.max_batch_tokens, max_logits, dtype)
    vocab_size = decoder.vocab_size + config.max_added_tokens
    values_bytes = _values_bytes(decoder, sizes) + _int8_bytes(decoder, sizes)
    return values_bytes + _logits_bytes(decoder, max_logits, vocab_size)


def _logits_bytes(decoder: Decoder, max_logits: int, vocab_size: int) -> int:
    head = operations(decoder, Narrowing.BEFORE_HEAD).head
    return 4 * max_logits * vocab_size if head and decoder.encoder is None else 0


def _int8_bytes(decoder: Decoder, sizes: ValueSizes) -> int:
    """Returns the most bytes of the inputs of a product that are rounded to INT8."""
    found = operations(decoder, Narrowing.BEFORE_HEAD)
    return max(
        (
            Int8Inputs.bytes_of(sizes.rows(op.inputs[0]), op.projection.in_features, part.format)
            for op in (*found.layers, *found.head)
            if isinstance(op, Project | ProjectExperts | Logits)
            for part in op.projection.parts
            if part.format is not None and part.format.activations is Activations.INT8
        ),
        default=0,
    )


def _values_bytes(decoder: Decoder, sizes: ValueSizes) -> int:
    found = operations(decoder, Narrowing.BEFORE_HEAD)
    apart = _placed(found, sizes, _taken(decoder), is_apart=True)
    if decoder.encoder is not None:
        return apart.num_bytes
    whole = _placed(operations(decoder, Narrowing.IN_LAST_LAYER), sizes, (), is_apart=False)
    return max(whole.num_bytes, apart.num_bytes)


def _taken(decoder: Decoder) -> tuple[Value, ...]:
    """Returns the outputs of a tower's taps, and of its connector."""
    if decoder.patches is None:
        return ()
    found = operations(decoder, Narrowing.BEFORE_HEAD)
    return outputs_of(decoder, (*found.layers, *found.head))


def _placed(
    found: Operations, sizes: ValueSizes, taken: tuple[Value, ...], *, is_apart: bool
) -> Placed:
    ops = (*found.layers, *found.head)
    ends = found.head[-1:]
    apart = {op.out for op in ends if isinstance(op, Logits | HandOn | Receive)}
    return place(ops, sizes, (*found.kept, *taken) if is_apart else (), apart)
