"""The answers of one streaming RPC, as iterators that retry where it is safe.

Leaving one cancels its RPC.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from loadout._routing.route import Route
from loadout._rpc import status
from loadout._rpc.calls import StreamCall
from loadout.retry import Attempts

T = TypeVar("T")


class _Stream(Generic[T]):
    """What both kinds share: the RPC that runs, the item seen last, and what follows a failure."""

    def __init__(self, route: Route, call: StreamCall[T], attempts: Attempts) -> None:
        self._route = route
        self._spec = call
        self._attempts = attempts
        self._last: T | None = None
        self._rpc: Any = None
        self._closed = False
        if route.is_ready:
            self._open(call.request)

    def close(self) -> None:
        """Cancels the RPC; the iteration ends. Does nothing the second time."""
        self._closed = True
        self._route.done()
        if self._rpc is not None:
            self._rpc.cancel()

    def __del__(self) -> None:
        self.close()

    def _open(self, request: Any) -> None:
        """Does nothing if the stream was closed while it waited for this attempt."""
        if not self._closed:
            self._rpc = self._route.send(request, self._attempts.remaining_s)

    def _accept(self, message: Any) -> T:
        self._attempts.succeeded()
        self._last = self._spec.convert(message)
        return self._last

    def _next_attempt(self, error: grpc.RpcError) -> tuple[float, Any] | None:
        """Seconds to wait and the request to go on with, None if it was closed meanwhile.

        Raises LoadoutError if there is nothing to go on with.
        """
        if self._closed:
            return None
        failure = status.from_rpc_error(error)
        elsewhere = self._route.failed(failure, error.trailing_metadata())
        request = self._spec.resume(self._last)
        delay = None
        if request is not None:
            delay = self._attempts.delay_s(failure, repeatable=True, elsewhere=elsewhere)
        if delay is None:
            self.close()
            raise failure from error
        return delay, request


class Stream(_Stream[T]):
    """An iterator; iterating raises LoadoutError.

    Leaving it cancels the RPC: `close()`, the end of a `with` block, or dropping the last
    reference, as `break` in `for chunk in client.generate(...)` does.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while not self._closed:
            try:
                return self._accept(next(self._rpc))
            except StopIteration:
                self._route.done(self._rpc.trailing_metadata() or ())
                self.close()
            except grpc.RpcError as error:
                if again := self._next_attempt(error):
                    delay_s, request = again
                    time.sleep(delay_s)
                    self._open(request)
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Stream[T]):
    """An async iterator; iterating raises LoadoutError, and leaving it cancels the RPC."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._closed:
            try:
                if self._rpc is None:
                    await self._route.ready()
                    self._open(self._spec.request)
                    continue  # it may have been closed meanwhile
                message = await self._rpc.read()
            except grpc.RpcError as error:
                if again := self._next_attempt(error):
                    delay_s, request = again
                    await asyncio.sleep(delay_s)
                    self._open(request)
            except asyncio.CancelledError:
                self.close()
                if _is_cancelled():
                    raise
                break  # another task closed this stream
            else:
                if message is not grpc.aio.EOF:
                    return self._accept(message)
                self._route.done(await self._rpc.trailing_metadata() or ())
                self.close()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
