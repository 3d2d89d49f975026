"""The interceptor that notes whose calls come on which connection, outside of all others."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc

from servicekit.rpc.places import IS_KNOWN
from servicekit.rpc.strangers import Strangers

RESET_SECONDS = 0.05
"""A call that its caller cancels sooner is a reset."""

Handler: TypeAlias = Callable[[Any, Any], Any]
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class StrangerInterceptor(grpc.aio.ServerInterceptor):
    """Notes every call at its connection, health checks and calls of no method included. Calls of a
    connection that is being closed cost next to nothing. `strangers` is set before the first."""

    strangers: Strangers

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._wrapped(_unimplemented))
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)
        is_generator = inspect.isasyncgenfunction(behaviour)
        wrapped = self._wrapped_generator(behaviour) if is_generator else self._wrapped(behaviour)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        made: grpc.RpcMethodHandler = make(
            wrapped, handler.request_deserializer, handler.response_serializer
        )
        return made

    def _wrapped(self, behaviour: Handler) -> Handler:
        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._noted(context):
                return await behaviour(requests, context)

        return answer

    def _wrapped_generator(self, behaviour: Handler) -> Handler:
        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with (
                self._noted(context),
                aclosing(behaviour(requests, context)) as responses,
            ):
                async for response in responses:
                    yield response

        return answer

    @asynccontextmanager
    async def _noted(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Notes a call and its end. Raises AbortError for a call of a connection that is being
        closed, and for one without a token too many."""
        peer, is_known, start_s = context.peer(), IS_KNOWN.get(), time.monotonic()
        try:
            if not self.strangers.note_call(peer, is_known):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "too many calls without a token")
            yield
        except asyncio.CancelledError:
            if time.monotonic() - start_s < RESET_SECONDS:
                self.strangers.note_reset(peer)
            raise
        finally:
            if is_known:
                self.strangers.note_end(peer)


async def _unimplemented(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
