"""The memory of recurrent states, which mixers read and write by slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.core import EMPTY_STATE, BatchRow, Sequence
from inference_svc.model.description import Decoder

ITEM_BYTES = 4
"""A state is a sum over all tokens: its elements are fp32."""


class RecurrentPlan(NamedTuple):
    """Where a step's rows find the states of their sequences, and where they leave them.

    `read` and `written`, int64 [rows], are slots: none is in both, so that the step may be computed
    again. `counts` are the tokens of each row.
    """

    states: RecurrentStates
    read: Tensor
    written: Tensor
    counts: tuple[int, ...]


@dataclass(slots=True)
class RecurrentStates:
    """States of the recurrent layers: for each its parts, fp32 [slots, *shape of the part].

    Slot 0 is the state before the first token: all zeros, and never written. Sequences own the
    slots from 1 on; the last one is for rows that are computed in parts.
    """

    layers: Mapping[int, tuple[Tensor, ...]]
    _continued: tuple[Sequence, int] | None = field(default=None, init=False)

    @classmethod
    def allocate(
        cls, decoder: Decoder, num_states: int, device: torch.device | str = "cpu"
    ) -> RecurrentStates:
        """Returns states that `num_states` sequences may own."""

        def zeros(shape: tuple[int, ...]) -> Tensor:
            size = num_slots(num_states), *shape
            return torch.zeros(size, dtype=torch.float32, device=device)

        layers = {
            layer: tuple(map(zeros, mixer.state_shapes))
            for layer, mixer in decoder.recurrences.items()
        }
        return cls(layers)

    @property
    def num_states(self) -> int:
        """The slots that sequences may own."""
        return self._num_slots - num_slots(0)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for parts in self.layers.values() for part in parts)

    def plan(self, rows: SequenceOf[BatchRow]) -> RecurrentPlan:
        """Returns the plan of a step. A row that goes on where another part of it has ended, in the
        same step, reads the state of that part."""
        read = [row.sequence.state_read for row in rows]
        written = [row.sequence.state_written for row in rows]
        for index, (sequence, start, _, _) in enumerate(rows):
            if start != sequence.num_computed:
                read[index] = self._go_on(sequence, start)
            elif self._continued is not None and self._continued[0] is sequence:
                self._continued = None
        assert EMPTY_STATE not in written, "the state of a sequence that does not run"
        return RecurrentPlan(
            self, self._tensor(read), self._tensor(written), tuple(row.num_tokens for row in rows)
        )

    def _go_on(self, sequence: Sequence, start: int) -> int:
        """Copies the state that the part before has written, once: what writes it next may be
        computed again."""
        spare = self._num_slots - 1
        if self._continued != (sequence, start):
            for parts in self.layers.values():
                for part in parts:
                    part[spare] = part[sequence.state_written]
            self._continued = sequence, start
        return spare

    @property
    def _num_slots(self) -> int:
        return len(next(iter(self.layers.values()))[0])

    def _tensor(self, slots: list[int]) -> Tensor:
        device = next(iter(self.layers.values()))[0].device
        return torch.tensor(slots, dtype=torch.int64).to(device)


def num_slots(num_states: int) -> int:
    """Returns the slots of states that `num_states` sequences may own."""
    return num_states + 2


def slot_bytes(decoder: Decoder) -> int:
    """Returns the memory of one slot: the state of one sequence in all layers; 0 for a decoder
    without recurrent layers."""
    shapes = (shape for mixer in decoder.recurrences.values() for shape in mixer.state_shapes)
    return ITEM_BYTES * sum(map(math.prod, shapes))


def recurrent_bytes(decoder: Decoder, num_states: int) -> int:
    """Returns the memory of states that `num_states` sequences may own."""
    return num_slots(num_states) * slot_bytes(decoder)
