"""grpc.health.v1, for callers without a token: the requests that it reads and holds are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

if TYPE_CHECKING:
    from servicekit.rpc.call import Trailers

MAX_ARRIVING = 1
"""Requests that are read at once: each may be as large as the server's largest message. A request
that is there already, as most are, is read without a pause."""
ARRIVAL_SECONDS = 2.0
MAX_REQUEST_BYTES = 1024
MAX_WATCHES = 128
MAX_WATCHES_OF_PEER = 32

Status: TypeAlias = HealthCheckResponse.ServingStatus
Context: TypeAlias = grpc.aio.ServicerContext


class Health:
    """The health service of a server whose services are all in one state.

    Both always answer: while too many requests are arriving, for the server as a whole, without
    reading which service is asked for. Watch refuses, with RESOURCE_EXHAUSTED, streams that are too
    many for the server or for its peer's address. `trailers` are sent with the answers of Check.
    """

    def __init__(self, services: tuple[str, ...], trailers: Callable[[], Trailers]) -> None:
        self._services = frozenset(("", *services))
        self._trailers = trailers
        self._status: Status = HealthCheckResponse.NOT_SERVING
        self._is_ending = False
        self._changed = asyncio.Event()
        self._arriving = asyncio.Semaphore(MAX_ARRIVING)
        self._watches: Counter[str] = Counter()

    def add_to(self, server: grpc.aio.Server) -> None:
        # As streams: nothing of a stream is read before it is asked for.
        serialize = HealthCheckResponse.SerializeToString
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(
                self._check, response_serializer=serialize
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, response_serializer=serialize
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers),)
        )

    def set_serving(self, is_serving: bool) -> None:
        """Has no effect after `announce_end`."""
        if not self._is_ending:
            self._set(
                HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
            )

    def announce_end(self) -> None:
        """Answers NOT_SERVING from now on."""
        self._is_ending = True
        self._set(HealthCheckResponse.NOT_SERVING)

    def _set(self, status: Status) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, requests: AsyncIterator[bytes], context: Context) -> HealthCheckResponse:
        context.set_trailing_metadata(self._trailers())
        if await self._read(context) not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=self._status)

    async def _watch(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncGenerator[HealthCheckResponse]:
        peer = context.peer().rpartition(":")[0]  # without its port
        is_full = self._watches.total() >= MAX_WATCHES
        if is_full or self._watches[peer] >= MAX_WATCHES_OF_PEER:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many watches: at most {MAX_WATCHES}, {MAX_WATCHES_OF_PEER} of one address",
            )
        with self._counted(peer):
            is_known = await self._read(context) in self._services
            last: Status | None = None
            while True:
                changed = self._changed
                status = self._status if is_known else HealthCheckResponse.SERVICE_UNKNOWN
                if status != last:
                    last = status
                    yield HealthCheckResponse(status=status)
                await changed.wait()

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        self._watches[peer] += 1
        try:
            yield
        finally:
            self._watches[peer] -= 1
            self._watches += Counter()  # forgets addresses that have none

    async def _read(self, context: Context) -> str:
        """Returns the service that is asked for, "" unread while too many requests are arriving.
        Ends the call if there is no such message."""
        if self._arriving.locked():
            return ""
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS), self._arriving:
                raw = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request has not arrived")
        if raw is grpc.aio.EOF:
            raw = b""
        if len(raw) > MAX_REQUEST_BYTES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the request is too large")
        try:
            service: str = HealthCheckRequest.FromString(raw).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
        return service
