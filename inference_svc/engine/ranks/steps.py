"""A step as one buffer of numbers: residency changes, and then rows. Changes alone are one, too.

Positions along all axes, and lists, of int64, each behind its length. An adapter is named by the
bytes of its digest. Of a sequence's pages a step has those alone that the row of the step before
had not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_svc.adapters.memory.tiers import (
    DivideMagnitudes,
    MixWrite,
    ResidencyChange,
    TableClear,
    TableWrite,
)
from inference_svc.backends.slot_runs import SlotRuns
from inference_svc.backends.step_data import ScoredSlice, StepData
from inference_svc.model.recurrent_states import Segment, StateCopy
from inference_svc.pictures.positions import NUM_AXES

_CLEAR, _WRITE, _MIX, _DIVIDE = range(4)
_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Makes this rank's part of an adapter visible to kernels at `slot` of the table."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class SlotDivide:
    """Starts to divide the magnitudes of this rank's part of an adapter, before it becomes visible
    at `slot` of the table."""

    slot: int
    digest: str


Change: TypeAlias = TableClear | SlotWrite | SlotDivide | MixWrite
"""A residency change as other ranks get it."""


class StepMessage(NamedTuple):
    """The changes since the step before, and the step."""

    changes: list[Change]
    data: StepData


class StepWriter:
    """Writes the buffers of steps, which a `StepReader` reads in this order. A list of pages only
    ever grows; other pages are another list."""

    def __init__(self) -> None:
        self._lists: list[list[int]] = []
        self._sizes: list[int] = []

    def write(self, changes: Sequence[ResidencyChange], data: StepData) -> bytes:
        """Returns a step's buffer."""
        kept, added = self._pages(data.page_ids)
        lists: list[Sequence[int]] = [
            _encode_all(changes),
            data.token_ids,
            data.starts,
            data.counts,
            kept,
            [len(each) for each in added],
            list(chain.from_iterable(added)),
            *data.runs,
            data.last_slots,
            [data.returns_experts, data.is_pooled, *chain.from_iterable(data.pictures)],
            data.plan,
            list(chain.from_iterable(data.segments)),
            list(chain.from_iterable(data.state_copies)),
        ]
        for each in data.scored:
            lists += [each.indices, *each.runs]
        numbers: list[int] = []
        for one in lists:
            numbers.append(len(one))
            numbers += one
        # Three numbers a token, which do not pass through a list.
        axes = np.empty(0, dtype=np.int64) if data.axes is None else data.axes.ravel()
        return b"".join(
            np.array(each, dtype=np.int64).tobytes() for each in (axes.size, axes, numbers)
        )

    def _pages(self, rows: list[list[int]]) -> tuple[list[int], list[Sequence[int]]]:
        """Returns how many pages each row keeps of the same row of the step before, and the pages
        that come behind these."""
        num_new = max(0, len(rows) - len(self._lists))
        self._lists += [[] for _ in range(num_new)]
        self._sizes += [0] * num_new
        kept = [
            size if pages is known else 0
            for pages, known, size in zip(rows, self._lists, self._sizes, strict=False)
        ]
        added: list[Sequence[int]] = [
            pages[first:] if first < len(pages) else ()
            for pages, first in zip(rows, kept, strict=True)
        ]
        self._lists[: len(rows)] = rows
        self._sizes[: len(rows)] = map(len, rows)
        return kept, added


class StepReader:
    """Reads the buffers that a `StepWriter` writes, in this order. A row's list of pages is the one
    of the step before where it keeps its pages."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []

    def read(self, buffer: bytes) -> StepMessage:
        """Returns the content of a step's buffer. The next one changes its pages."""
        numbers = np.frombuffer(buffer, dtype=np.int64)
        size = int(numbers[0])
        axes = numbers[1 : 1 + size].reshape(NUM_AXES, -1) if size else None
        changes, token_ids, starts, counts, kept, sizes, pages, *rest = _lists(numbers[1 + size :])
        slots, lengths, last_slots, flags, plan, segments, copies, *scored = rest
        returns_experts, is_pooled, *pictures = flags
        data = StepData(
            token_ids,
            starts,
            counts,
            self._pages(kept, sizes, pages),
            SlotRuns(slots, lengths),
            last_slots,
            [
                ScoredSlice(scored[at], SlotRuns(scored[at + 1], scored[at + 2]))
                for at in range(0, len(scored), 3)
            ],
            [Segment(*each) for each in _tuples(segments, 3)],
            [StateCopy(*each) for each in _tuples(copies, 2)],
            bool(returns_experts),
            tuple(plan),
            bool(is_pooled),
            tuple((start, end) for start, end in _tuples(pictures, 2)),
            axes,
        )
        return StepMessage(list(_decode_all(changes)), data)

    def _pages(self, kept: list[int], sizes: list[int], pages: list[int]) -> list[list[int]]:
        self._rows += [[] for _ in range(len(kept) - len(self._rows))]
        ends = accumulate(sizes, initial=0)
        for row, (num_kept, (start, end)) in enumerate(zip(kept, pairwise(ends), strict=True)):
            if not num_kept:
                self._rows[row] = pages[start:end]
            elif start < end:
                assert num_kept == len(self._rows[row])
                self._rows[row] += pages[start:end]
        return self._rows[: len(kept)]


def encode_changes(changes: Sequence[ResidencyChange]) -> bytes:
    """Returns the buffer of changes without a step."""
    return np.array(_encode_all(changes), dtype=np.int64).tobytes()


def decode_changes(buffer: bytes) -> list[Change]:
    """Returns the content of a buffer that `encode_changes` has made."""
    return list(_decode_all(np.frombuffer(buffer, dtype=np.int64).tolist()))


def _tuples(numbers: list[int], size: int) -> Iterator[list[int]]:
    for at in range(0, len(numbers), size):
        yield numbers[at : at + size]


def _lists(numbers: NDArray[np.int64]) -> Iterator[list[int]]:
    at = 0
    while at < len(numbers):
        end = at + 1 + int(numbers[at])
        yield numbers[at + 1 : end].tolist()
        at = end


def _encode_all(changes: Sequence[ResidencyChange]) -> list[int]:
    return list(chain.from_iterable(map(_encode_change, changes)))


def _encode_change(change: ResidencyChange) -> list[int]:
    if isinstance(change, TableClear):
        return [_CLEAR, change.slot]
    if isinstance(change, MixWrite):
        slots = [slot for slot, _ in change.parts]
        scales = np.array([scale for _, scale in change.parts], dtype=np.float64)
        return [_MIX, change.slot, len(slots), *slots, *scales.view(np.int64).tolist()]
    assert isinstance(change, TableWrite | DivideMagnitudes), "ranks have no host tier"
    kind = _WRITE if isinstance(change, TableWrite) else _DIVIDE
    name = change.resident.digest.encode()
    padded = name.ljust(-(-len(name) // _ITEM_BYTES) * _ITEM_BYTES, b"\0")
    words = np.frombuffer(padded, dtype=np.int64).tolist()
    return [kind, change.resident.slot, len(words), *words]


def _decode_all(numbers: list[int]) -> Iterator[Change]:
    at = 0
    while at < len(numbers):
        kind, slot = numbers[at : at + 2]
        at += 2
        if kind == _CLEAR:
            yield TableClear(slot)
            continue
        size = numbers[at]
        first, at = numbers[at + 1 : at + 1 + size], at + 1 + size
        if kind in (_WRITE, _DIVIDE):
            name = np.array(first, dtype=np.int64).tobytes().rstrip(b"\0").decode()
            yield SlotWrite(slot, name) if kind == _WRITE else SlotDivide(slot, name)
            continue
        scales = np.array(numbers[at : at + size], dtype=np.int64).view(np.float64).tolist()
        at += size
        yield MixWrite(slot, tuple(zip(first, scales, strict=True)))
