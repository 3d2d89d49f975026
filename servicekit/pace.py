"""The least pace of a transfer, so that it holds its place no longer than it makes progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class Pace:
    """The slowest that a transfer may be: it may be silent for `stall_seconds`, and behind
    `bytes_per_second` by as long."""

    bytes_per_second: int
    stall_seconds: float


class MinimumRate:
    """How long a transfer may still wait for its peer: waiting takes from it, bytes add to it, and
    nothing else does. Used by one thread."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.remaining_s = pace.stall_seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time in the context as waiting for the peer."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.waited(time.monotonic() - start_s)

    def waited(self, seconds: float) -> None:
        self.remaining_s -= seconds

    def received(self, num_bytes: int) -> None:
        """Counts bytes that the peer sent, or took."""
        earned_s = num_bytes / self._pace.bytes_per_second
        self.remaining_s = min(self._pace.stall_seconds, self.remaining_s + earned_s)

    @property
    def is_too_slow(self) -> bool:
        return self.remaining_s <= 0


async def at_pace(
    messages: AsyncIterator[MessageT],
    pace: Pace,
    size_of: Callable[[MessageT], int],
    too_slow: Callable[[Pace], Exception],
) -> AsyncGenerator[MessageT]:
    """Yields the messages of a peer, each of which counts as the bytes that `size_of` returns.
    Raises what `too_slow` returns for a peer that is slower than `pace`. The time of the reader
    does not count."""
    rate = MinimumRate(pace)
    while True:
        try:
            async with asyncio.timeout(rate.remaining_s):
                with rate.waiting():
                    message = await anext(messages, None)
        except TimeoutError:
            raise too_slow(pace) from None
        if message is None:
            return
        rate.received(size_of(message))
        if rate.is_too_slow:
            raise too_slow(pace)
        yield message
