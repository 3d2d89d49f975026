"""Queues of work on a device, and marks in them: what orders copies and what computes.

A stream runs what it is given later, in order; two streams run side by side. What is queued names
memory and holds no values: until it has run, its sources must stay as they are, and nobody may use
its targets who does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in one stream."""

    def record(self) -> None:
        """Moves the mark behind all that the stream has been given."""

    def query(self) -> bool:
        """Returns whether all before the mark has run. True where nothing was recorded."""

    def synchronize(self) -> None:
        """Waits until all before the mark has run."""


class Stream(Protocol):
    """One queue."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queues a copy for each (target, source). Host memory is pinned, or this may wait."""

    def event(self) -> Event:
        """Makes an event of this stream, not recorded yet."""

    def wait_stream(self, other: Stream) -> None:
        """Lets what is queued here from now on wait for all that is queued there so far."""


class Streams(NamedTuple):
    """A device's: `compute` has the steps and what they read, `copies` the images of adapters."""

    compute: Stream
    copies: Stream

    @classmethod
    def of(cls, device: torch.device) -> Streams:
        """Returns those of a CUDA device, the one that is current and another; elsewhere two that
        do everything at once."""
        if device.type == "cuda":
            return cls(_CudaStream(device), _CudaStream(device, torch.cuda.Stream(device)))
        return cls(_HostStream(), _HostStream())


class _CudaStream:
    """`stream`, or the one that is current whenever it is used."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    @property
    def queue(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return _CudaEvent(self)

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


class _HostStream:
    """Does everything at once, and so is its own event, which has always passed."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def event(self) -> Event:
        return self

    def wait_stream(self, other: Stream) -> None:
        """Returns: there is nothing to wait for."""

    def record(self) -> None:
        """Returns: all has run."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns: all has run."""
