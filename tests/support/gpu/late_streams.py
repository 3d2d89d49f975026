"""Streams of a device that does its work as late, and in as bad an order, as it may.

What is queued runs when a choice says so, or when somebody waits for it; a copy runs in two halves,
with anything between them. One kind of wait can be ignored: who needs it then sees what he should
not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from kernels.streams import HostStopwatch, Streams

MOST_AT_ONCE = 4
"""The most that runs of a stream while the host does one thing."""
EAGERNESS = (0.01, 0.05, 0.3)
"""How often anything of a stream does: each has one of these, so that one may be far ahead."""


@dataclass
class LateDevice:
    """`random` chooses what runs when. `ignored` is one of `sites`: the places, as "Arena.apply:
    wait_stream", that have recorded or waited so far."""

    random: Random
    ignored: str | None = None
    sites: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.compute, self.copies = LateStream(self), LateStream(self)

    @property
    def streams(self) -> Streams:
        return Streams(self.compute, self.copies, self.compute)

    def heeds(self, method: str) -> bool:
        """Whether to do what the caller's caller asks for by `method`."""
        site = f"{sys._getframe(2).f_code.co_qualname}: {method}"
        self.sites.add(site)
        return site != self.ignored

    def run_some(self) -> None:
        """Runs as much of each stream as the choice says."""
        for stream in (self.compute, self.copies):
            if stream.work and self.random.random() < stream.eagerness:
                stream.run_to(stream.num_run + self.random.randint(1, MOST_AT_ONCE))

    def finish(self) -> None:
        for stream in (self.compute, self.copies):
            stream.run_to(stream.num_queued)


class LateStream:
    """A `Stream`."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.work: deque[Callable[[], None]] = deque()
        self.num_queued = self.num_run = 0
        self.eagerness = device.random.choice(EAGERNESS)

    def launch(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.num_queued += 1
        self.device.run_some()

    def run_to(self, end: int) -> None:
        """Runs the first `end` that were ever queued, as far as there are so many."""
        while self.work and self.num_run < end:
            self.work.popleft()()
            self.num_run += 1

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            middle = len(target) // 2
            for half in (slice(middle, None), slice(0, middle)):
                self.launch(lambda to=target[half], of=source[half]: to.copy_(of))  # type: ignore[misc]

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()  # what steps launch is queued as a whole

    def event(self) -> LateEvent:
        return LateEvent(self)

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def wait_stream(self, other: LateStream) -> None:
        if self.device.heeds("wait_stream"):
            self.launch(lambda end=other.num_queued: other.run_to(end))  # type: ignore[misc]


class LateEvent:
    """An `Event`."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._end = 0

    def record(self) -> None:
        if self._stream.device.heeds("record"):
            self._end = self._stream.num_queued

    def query(self) -> bool:
        self._stream.device.run_some()
        return not self._stream.device.heeds("query") or self._stream.num_run >= self._end

    def synchronize(self) -> None:
        if self._stream.device.heeds("synchronize"):
            self._stream.run_to(self._end)
