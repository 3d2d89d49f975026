"""A server of a few methods whose callers name their accounts, without tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

from servicekit.pace import Pace
from servicekit.rpc.interceptor import CallInterceptor, CallRules, Continuation
from servicekit.rpc.places import CALLER, CallPlaces
from servicekit.rpc.requests import RequestBounds
from servicekit.shares import Shares
from servicekit.telemetry.recent_errors import CallEnd

ACCOUNT = "x-account"
"""The metadata in which a caller names its account."""
PACE = Pace(bytes_per_second=64 << 10, stall_seconds=30.0)


def call_places(
    request_bytes: int = 64 << 20,
    answer_bytes: int = 64 << 20,
    share: float = 0.5,
    pace: Pace = PACE,
) -> CallPlaces:
    return CallPlaces(
        Shares("request_bytes", request_bytes, share),
        Shares("answer_bytes", answer_bytes, share),
        share,
        pace,
    )


class Accounts(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        CALLER.set(dict(handler_call_details.invocation_metadata).get(ACCOUNT, ""))
        return await continuation(handler_call_details)


@asynccontextmanager
async def serving(
    rules: CallRules,
    places: CallPlaces,
    handlers: dict[str, grpc.RpcMethodHandler],
    on_end: Callable[[CallEnd], None] = lambda end: None,
    add: Callable[[grpc.aio.Server], Any] = lambda server: None,
) -> AsyncIterator[str]:
    """Serves the methods of /test.Service; yields the address. `add` adds services of its own."""
    interceptors = (CallInterceptor(rules, places, on_end), Accounts())
    server = grpc.aio.server(interceptors=interceptors)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", handlers),)
    )
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        places.close()


REQUESTS = {"Do": RequestBounds(BytesValue)}
