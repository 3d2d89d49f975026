"""Queues of work on a device, and events that order copies and computation.

A stream runs its work later, in order; two streams run in parallel. Queued work refers to memory
and holds no values. Until it has run, its sources must stay unchanged, and only those who wait for
it may use its targets.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in one stream's work."""

    def record(self) -> None:
        """Moves the event after all work that the stream has so far."""

    def query(self) -> bool:
        """Returns whether all work before the event has run. True if nothing was recorded."""

    def synchronize(self) -> None:
        """Waits until all work before the event has run."""


class Stopwatch(Protocol):
    """Measures a piece of one stream's work."""

    def start(self) -> None:
        """Begins the piece after all work that the stream has so far."""

    def stop(self) -> None:
        """Ends it after all work that the stream has so far."""

    def seconds(self) -> float:
        """Waits until the piece has run; returns the seconds that it took."""


class Stream(Protocol):
    """One queue of work."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queues a copy for each pair of target and source, of equal shape [...] and dtype. Unless
        host memory is pinned, this may wait."""

    def entered(self) -> AbstractContextManager[object]:
        """Within the context, what the thread launches and allocates belongs to this stream."""

    def event(self) -> Event:
        """Returns a new event of this stream, which is not recorded yet."""

    def stopwatch(self) -> Stopwatch:
        """Returns a stopwatch for pieces of this stream's work, one after the other."""

    def wait_stream(self, other: Stream) -> None:
        """Makes work queued here from now on wait for all work queued there so far."""


class Streams(NamedTuple):
    """The streams of a device: `compute` has the steps and their inputs, `copies` the images of
    adapters, `beside` the parts of recorded steps that run beside the others."""

    compute: Stream
    copies: Stream
    beside: Stream

    @classmethod
    def of(cls, device: torch.device) -> Streams:
        """Returns the current stream and two others of a CUDA device; on other devices, streams
        that do everything at once."""
        if device.type == "cuda":
            copies, beside = (_CudaStream(device, torch.cuda.Stream(device)) for _ in range(2))
            return cls(_CudaStream(device), copies, beside)
        return cls(*(HostStream(name) for name in cls._fields))


class _CudaStream:
    """`stream`, or the device's current stream at each use."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    @property
    def queue(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with self.entered():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return _CudaEvent(self)

    def stopwatch(self) -> Stopwatch:
        return _CudaStopwatch(self)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, _CudaStream)
        self.queue.wait_stream(other.queue)


class _CudaEvent:
    def __init__(self, stream: _CudaStream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(self._stream.queue)

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class _CudaStopwatch:
    def __init__(self, stream: _CudaStream) -> None:
        self._stream = stream
        self._edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        self._edges[0].record(self._stream.queue)

    def stop(self) -> None:
        self._edges[1].record(self._stream.queue)

    def seconds(self) -> float:
        begin, end = self._edges
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class HostStopwatch:
    """Measures work of this thread, which runs at once."""

    def __init__(self) -> None:
        self._began_s = self._seconds = 0.0

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._began_s

    def seconds(self) -> float:
        return self._seconds


class HostStream:
    """Does everything at once. It is its own event, which has always passed. `name` is its field of
    `Streams`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Event:
        return self

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def wait_stream(self, other: Stream) -> None:
        """Returns at once, because there is nothing to wait for."""

    def record(self) -> None:
        """Returns: all has run."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns: all has run."""
