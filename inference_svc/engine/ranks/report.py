"""Reports of ranks for operators: memory, the seconds of steps, and where threads are.

Counting costs a step four readings of clocks, and two for each exchange. Nothing here pickles
within a step: the figures travel with the answers to pings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from inference_svc.engine.control.status_types import RankStatus
from inference_svc.host.memory import resident_bytes
from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import Exchange

ANSWER_S = 2.0
"""How long other ranks may take to say where their threads are."""


class Held(Protocol):
    """The memory of a backend."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def pull_memory(self) -> memoryview: ...


class Report:
    """The figures of this process's rank. One thread computes, any may ask for the status.

    `exchange` is set once ranks have met. The thread that computes notes changes of memory: another
    would find a backend that frees its own.
    """

    def __init__(self, rank: Rank, num_threads: int, stage: int = 0) -> None:
        self._rank, self._num_threads, self._stage = rank, num_threads, stage
        self.exchange: Exchange | None = None
        self.processors: tuple[int, ...] = ()
        """The processors that its threads are bound to; empty: the system decides."""
        self._memory = (0, 0, 0)
        self._num_steps = 0
        self._step_s = self._exchange_s = 0.0

    def note_memory(self, backend: Held) -> None:
        arena_bytes = backend.pull_memory.nbytes
        self._memory = backend.weights_bytes, backend.kv_bytes, arena_bytes

    @contextmanager
    def step(self, *, is_new: bool = True) -> Iterator[None]:
        """Counts the seconds of a step, or of a further part of the last one, and of its exchanges:
        loading adapters takes others."""
        began_s, exchanged_s = perf_counter(), self._exchanged_s
        try:
            yield
        finally:
            self._step_s += perf_counter() - began_s
            self._exchange_s += self._exchanged_s - exchanged_s
            self._num_steps += is_new

    @property
    def _exchanged_s(self) -> float:
        return 0.0 if self.exchange is None else self.exchange.seconds

    def status(self, pulled_bytes: int, num_pulls: int) -> RankStatus:
        weights_bytes, kv_bytes, arena_bytes = self._memory
        return RankStatus(
            index=self._rank.index,
            stage=self._stage,
            process_id=os.getpid(),
            answers=True,
            resident_bytes=resident_bytes(),
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            arena_bytes=arena_bytes,
            num_steps=self._num_steps,
            step_s=self._step_s,
            exchange_s=self._exchange_s,
            pulled_bytes=pulled_bytes,
            num_pulls=num_pulls,
            num_threads=self._num_threads,
            processors=self.processors,
        )


class RankStacks:
    """Collects the answers of ranks of these names: `ask` asks all, and answers come to `take`.

    The threads that take messages ask and answer: the ones that compute may hang.
    """

    def __init__(self, names: Sequence[str], ask: Callable[[], None]) -> None:
        self._names, self._ask = names, ask
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._found: dict[str, str] = {}

    def take(self, name: str, text: str) -> None:
        with self._changed:
            self._found[name] = text
            self._changed.notify_all()

    def collect(self) -> dict[str, str]:
        """Returns each rank's answer, or that there is none, by the rank's name."""
        with self._one_at_a_time:
            self._found = {}
            self._ask()
            with self._changed:
                self._changed.wait_for(lambda: len(self._found) == len(self._names), ANSWER_S)
                missing = f"no answer within {ANSWER_S:g} s\n"
                return {name: self._found.get(name, missing) for name in self._names}
