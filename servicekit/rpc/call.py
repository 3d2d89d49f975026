"""A call in progress, with its part of its account's share: its request until the handler lets go
of it, and its answers until they are sent.

gRPC keeps a message that its reader's window has no room for until the reader takes it or its
connection ends: neither an error nor the end of the handler lets go of it. So a call's answer is
counted until then, and a handler waits for a slow reader only so long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from servicekit.errors import ReaderStalled
from servicekit.pace import MinimumRate, Pace
from servicekit.shares import Reservation

COPIES = 2
"""Of a message that is being sent: ours, and gRPC's."""
MIN_CHECK_SECONDS = 0.05

Trailers: TypeAlias = tuple[tuple[str, str | bytes], ...]
Serialize: TypeAlias = Callable[[Any], bytes]


class Call:
    """The context that a handler gets: gRPC's, whose `write` ends with ReaderStalled if the reader
    is slower than `pace`. Belongs to the task that makes it, and holds its places at most until
    that ends: when all is sent, or the caller has gone."""

    def __init__(
        self, context: grpc.aio.ServicerContext, serialize: Serialize | None, pace: Pace
    ) -> None:
        self.turn: Reservation | None = None
        self.request_place: Reservation | None = None
        self.answer_place: Reservation | None = None
        self._context = context
        self._serialize = serialize
        self._pace = pace
        self._rate = MinimumRate(pace)
        self._first: asyncio.Future[None] | None = None
        """The first write. No status can follow a message that gRPC has not begun to send."""
        self._writing_since_s: float | None = None
        self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[status_pb2.Status, Trailers] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        task.add_done_callback(self._release)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Returns the bytes of the next message, or grpc.aio.EOF."""
        return await self._context.read()

    def release_request(self) -> None:
        """Gives the request's place back: the handler has let go of it."""
        if self.request_place is not None:
            self.request_place.release()

    def leave(self) -> None:
        """Gives back all but the answer's place: the handler has ended."""
        self.release_request()
        if self.turn is not None:
            self.turn.release()

    def serialized(self, message: Any) -> bytes:
        """Returns a message of the answer as bytes, which it may be already."""
        if isinstance(message, bytes) or self._serialize is None:
            raw: bytes = message
            return raw
        return self._serialize(message)

    def last(self, message: Any) -> bytes:
        """Returns the only message of an answer as bytes. The place keeps its memory."""
        raw = self.serialized(message)
        if self.answer_place is not None:
            self.answer_place.shrink(COPIES * len(raw))
        return raw

    async def write(self, message: Any) -> None:
        """Returns once the message is on its way. Raises ReaderStalled, ShareExceeded for a message
        that is larger than the place can become, and gRPC's errors if the caller has gone."""
        raw = self.serialized(message)
        place, usual_bytes = self.answer_place, 0
        if place is not None and COPIES * len(raw) > place.amount:
            usual_bytes = place.amount
            place.grow(COPIES * len(raw) - usual_bytes)
        if self._timer is None:
            self._check()
        start_s = self._writing_since_s = time.monotonic()
        try:
            if self._first is None:
                self._first = asyncio.ensure_future(self._context.write(raw))
                self._first.add_done_callback(_retrieve)
                await asyncio.shield(self._first)
            else:
                await self._context.write(raw)
        except asyncio.CancelledError:
            if self._is_stalled and self._task.uncancel() == 0:
                raise self._stalled() from None
            raise
        finally:
            self._writing_since_s = None
        self._rate.waited(time.monotonic() - start_s)
        self._rate.received(len(raw))
        if place is not None and usual_bytes:
            place.shrink(usual_bytes)

    def refuse(self, status: status_pb2.Status, trailers: Trailers) -> None:
        """Lets `end` answer with this."""
        self._refusal = status, trailers

    async def end(self) -> None:
        """Ends a call that was refused, after all earlier messages; waits until that is read or the
        caller has gone. Raises AbortError then."""
        if self._refusal is None:
            return
        if self._first is not None:
            await asyncio.wait((self._first,))
        await abort(self._context, *self._refusal)

    def _check(self) -> None:
        """Ends a write that takes too long; looks again when the next one may."""
        now_s = time.monotonic()
        since_s = self._writing_since_s
        remaining_s = self._rate.remaining_s - (0.0 if since_s is None else now_s - since_s)
        if since_s is not None and remaining_s <= 0:
            self._is_stalled = True
            self._task.cancel()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(remaining_s, MIN_CHECK_SECONDS), self._check)

    def _stalled(self) -> ReaderStalled:
        return ReaderStalled(
            f"the reader has read nothing for {self._pace.stall_seconds:g} seconds, or less than "
            f"{self._pace.bytes_per_second} bytes per second for as long",
            subject="answer",
        )

    def _release(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.leave()
        if self.answer_place is not None:
            self.answer_place.release()


async def abort(
    context: grpc.aio.ServicerContext, status: status_pb2.Status, trailers: Trailers = ()
) -> None:
    """Ends a call with this answer, once all earlier messages are read. Raises AbortError."""
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, *trailers))


def _retrieve(writing: asyncio.Future[None]) -> None:
    """Takes the error of a write that nobody waits for any more."""
    if not writing.cancelled():
        writing.exception()
