"""Timeouts of sequences, in a heap: only due ones are visited."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping

from inference_svc.core import AdapterKey, Sequence, SequenceState
from inference_svc.errors import AdapterUnavailable
from servicekit.errors import ServiceError


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


class AdapterWaits:
    """Waiting sequences of adapters, each for up to `wait_s` until the store delivers.

    `store_waits_since_s` returns since when the store has been waited for, by digest, for all
    adapters of a key; `wait_reason` why one is not here yet.
    """

    def __init__(
        self,
        store_waits_since_s: Callable[[AdapterKey], Mapping[str, float]],
        wait_reason: Callable[[str, float], str],
        wait_s: float,
    ) -> None:
        self._store_waits_since_s = store_waits_since_s
        self._wait_reason = wait_reason
        self._wait_s = wait_s
        self._expiries = Expiries()

    def add(self, sequence: Sequence, now_s: float) -> None:
        self._expiries.add(sequence, now_s + self._wait_s)

    def due(self, now_s: float) -> Iterator[Sequence]:
        """See Expiries.due; `error` tells which of them have waited too long."""
        return self._expiries.due(now_s)

    def next_s(self) -> float | None:
        return self._expiries.next_s()

    def error(self, sequence: Sequence, now_s: float) -> ServiceError | None:
        """Returns the error of a sequence that has waited too long; another one is due again when
        it may have."""
        expiry_s = self._expiry_s(sequence)
        if expiry_s is not None and now_s >= expiry_s:
            return self._unavailable(sequence, expiry_s, now_s)
        # It may wait for the store again later.
        self._expiries.add(sequence, now_s + self._wait_s / 4 if expiry_s is None else expiry_s)
        return None

    def _expiry_s(self, sequence: Sequence) -> float | None:
        """Returns None while the sequence does not wait for the store: only that wait is bounded;
        waiting for memory that is in use is queueing."""
        if sequence.state is not SequenceState.WAITING or sequence.adapter_wanted_s is None:
            return None
        waits = self._store_waits_since_s(sequence.request.key)
        if not waits:
            return None
        since_s = min(waits.values())
        return max(since_s, sequence.adapter_wanted_s) + self._wait_s

    def _unavailable(self, sequence: Sequence, expiry_s: float, now_s: float) -> ServiceError:
        request = sequence.request
        assert sequence.adapter_wanted_s is not None
        waits = self._store_waits_since_s(request.key)
        digest = min(waits, key=waits.__getitem__)
        return AdapterUnavailable(
            f"adapter {request.name_of(digest) or digest} was not loaded within "
            f"{expiry_s - sequence.adapter_wanted_s:.3g} s: "
            f"{self._wait_reason(digest, now_s)}",
            subject="adapter",
        )


def _is_open(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED
