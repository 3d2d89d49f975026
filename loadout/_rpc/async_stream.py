"""The responses of one streaming RPC, as an iterator that retries where it is safe."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from loadout._routing.fleet import RESOLVE_TIMEOUT_S
from loadout._rpc import status, tasks
from loadout._rpc.calls import StreamCall
from loadout._rpc.route import IMAGE_NOT_FOUND, Restore, Route
from loadout.retry import Attempts

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """An async iterator; iterating raises LoadoutError.

    Leaving the iterator cancels the RPC: by `close()`, by the end of a `with` block, or when you
    drop the last reference, as `break` in a loop over `client.generate(...)` does.
    """

    def __init__(
        self,
        route: Route,
        call: StreamCall[T],
        attempts: Attempts,
        restore: Restore | None = None,
    ) -> None:
        self._route = route
        self._restore = restore
        self._spec = call
        self._attempts = attempts
        self._last: T | None = None
        self._rpc: Any = None
        self._is_closed = False
        if tasks.is_done(route.resolving, RESOLVE_TIMEOUT_S):
            self._open(call.request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            while not self._is_closed:
                message = await self._read()
                if message is not None:
                    self._attempts.succeeded()
                    self._last = self._spec.convert(message)
                    return self._last
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    async def _read(self) -> Any:
        """Returns the next message; None if the stream is closed or another attempt has started."""
        try:
            if self._rpc is None:
                await tasks.wait(self._route.resolving, RESOLVE_TIMEOUT_S)
                self._open(self._spec.request)
                return None
            message = await tasks.read(self._rpc)
            if message is None:
                if not (self._is_closed or self._rpc.cancelled()):
                    self._route.done(await self._rpc.trailing_metadata() or ())
                self.close()
            return message
        except grpc.RpcError as error:
            if not self._is_closed and not await self._restored(error):
                delay_s, request = self._next_attempt(error)
                await tasks.sleep(delay_s)
                self._open(request)
            return None

    async def _restored(self, error: grpc.RpcError) -> bool:
        """Sends the request again if the replica lacked files that it has been given now, once.
        Raises LoadoutError if it does not take them."""
        failure = status.from_rpc_error(error, self._route.service)
        restore, address = self._restore, self._route.address
        if restore is None or failure.reason != IMAGE_NOT_FOUND:
            return False
        self._restore = None
        self._route.failed(failure, error.trailing_metadata())
        self._route.done()
        self._route = await restore(address, self._attempts.remaining_s)
        self._open(self._spec.request)
        return True

    def close(self) -> None:
        """Cancels the RPC, and ends the iteration. A second call does nothing."""
        self._is_closed = True
        self._route.done()
        if self._rpc is not None:
            self._rpc.cancel()

    def __del__(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, request: Any) -> None:
        """Does nothing if the stream was closed while it waited for this attempt."""
        if not self._is_closed:
            self._rpc = self._route.send(request, self._attempts.remaining_s)

    def _next_attempt(self, error: grpc.RpcError) -> tuple[float, Any]:
        """Returns seconds to wait, and the request to go on with. Raises LoadoutError if there is
        nothing to go on with."""
        failure = status.from_rpc_error(error, self._route.service)
        is_elsewhere = self._route.failed(failure, error.trailing_metadata())
        request = self._spec.resume(self._last)
        delay_s = None
        if request is not None:
            delay_s = self._attempts.delay_s(failure, repeatable=True, elsewhere=is_elsewhere)
        if delay_s is None:
            raise failure from error
        return delay_s, request
