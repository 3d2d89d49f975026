"""Timeouts of sequences, in a heap: only due ones are visited."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from inference_svc.core import Sequence, SequenceState


class Expiries:
    """Sequences by the time at which one of their waits may be over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()
        self._sweep_above = 64

    def add(self, sequence: Sequence, moment_s: float) -> None:
        heapq.heappush(self._heap, (moment_s, next(self._numbers), sequence))
        if len(self._heap) > self._sweep_above:
            self._heap = [entry for entry in self._heap if _is_open(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_above = 2 * len(self._heap) + 64

    def due(self, now_s: float) -> Iterator[Sequence]:
        """Removes and returns the sequences whose time has come, without the ones that have ended.
        Sequences may be added while the result is iterated."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        return filter(_is_open, due)

    def next_s(self) -> float | None:
        """Returns the earliest time of a sequence that has not ended."""
        while self._heap and not _is_open(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


def _is_open(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED
