"""The memory of recurrent states, which mixers read and write by slot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.core import EMPTY_STATE, BatchRow, Sequence
from inference_svc.model.description import Decoder
from kernels.host_memory import allocate_host
from kernels.recurrence import DeviceSegments, Segments

ITEM_BYTES = 4
"""A state is a sum over all tokens: its elements are fp32."""


class Segment(NamedTuple):
    """Tokens of a row, and the slots of the states before and after them. Segments of a row follow
    each other: each reads the state that the one before has written."""

    read: int
    written: int
    num_tokens: int


class StateCopy(NamedTuple):
    """The slot of a state, and a slot that gets a copy of it."""

    source: int
    target: int


class RecurrentPlan(NamedTuple):
    """The segments of a step's tokens, in order; on a device only it has them."""

    states: RecurrentStates
    segments: tuple[Segment, ...]
    on_device: DeviceSegments | None = None

    @property
    def of_kernels(self) -> Segments:
        """The segments as kernels have them."""
        read, written, counts = zip(*self.segments, strict=True) if self.segments else ((),) * 3
        return Segments(read, written, counts, self.on_device)


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """States of the recurrent layers: for each its parts, fp32 [slots, *shape of the part].

    Slot 0 is the state before the first token: all zeros, and never written. Sequences own the
    slots from 1 on; one more is for rows that are computed in parts.
    """

    layers: Mapping[int, tuple[Tensor, ...]]
    num_states: int
    """The slots that sequences may own."""

    @classmethod
    def allocate(
        cls, decoder: Decoder, num_states: int, device: torch.device | str = "cpu"
    ) -> RecurrentStates:
        """Returns states that `num_states` sequences may own."""

        def zeros(shape: tuple[int, ...]) -> Tensor:
            size = num_slots(num_states), *shape
            if torch.device(device).type != "cpu":
                return torch.zeros(size, dtype=torch.float32, device=device)
            return allocate_host(ITEM_BYTES * math.prod(size)).view(torch.float32).view(size)

        layers = {
            layer: tuple(map(zeros, mixer.state_shapes))
            for layer, mixer in decoder.recurrences.items()
        }
        return cls(layers, num_states)

    @property
    def spare(self) -> int:
        """The slot of a row that is computed in parts."""
        return spare_slot(self.num_states)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for parts in self.layers.values() for part in parts)

    def plan(self, rows: SequenceOf[BatchRow]) -> RecurrentPlan:
        """Returns the plan of a step."""
        return RecurrentPlan(self, tuple(each for row in rows for each in self.segments(row)))

    def segments(self, row: BatchRow) -> Iterator[Segment]:
        """Yields the segments of a row; see `segments_of`."""
        return segments_of(row.sequence, row.start, row.num_tokens, self.spare)

    def keep_part(self, row: BatchRow) -> None:
        """Keeps the state after a row's part; see `part_copies`."""
        self.copy(part_copies(row, self.spare))

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Copies states of all layers."""
        for source, target in copies:
            for parts in self.layers.values():
                for part in parts:
                    part[target] = part[source]


def segments_of(sequence: Sequence, start: int, num_tokens: int, spare: int) -> Iterator[Segment]:
    """Yields the segments of a sequence's next tokens: they end at its borders, and where it ends.
    Tokens after a part that the same step has computed read the state that was kept, in the slot
    `spare`."""
    read = sequence.state_read if start == sequence.num_computed else spare
    assert sequence.state_written != EMPTY_STATE, "the sequence does not run"
    end = start + num_tokens
    for border, slot in sequence.state_borders:
        if start < border < end:
            yield Segment(read, slot, border - start)
            read, start = slot, border
    yield Segment(read, sequence.state_written, end - start)


def part_copies(row: BatchRow, spare: int) -> list[StateCopy]:
    """Returns the copies that keep the state after a row's part, from which the next part
    continues: what that writes may be computed again."""
    sequence, end = row.sequence, row.start + row.num_tokens
    kept = [slot for border, slot in sequence.state_borders if border == end]
    return [StateCopy(sequence.state_written, slot) for slot in (spare, *kept)]


def num_slots(num_states: int) -> int:
    """Returns the slots of states that `num_states` sequences may own."""
    return num_states + 2


def spare_slot(num_states: int) -> int:
    """Returns the slot of a row that is computed in parts."""
    return num_slots(num_states) - 1


def slot_bytes(decoder: Decoder) -> int:
    """Returns the memory of one slot: the state of one sequence in all layers; 0 for a decoder
    without recurrent layers."""
    shapes = (shape for mixer in decoder.recurrences.values() for shape in mixer.state_shapes)
    return ITEM_BYTES * sum(map(math.prod, shapes))
