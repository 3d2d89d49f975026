"""The interceptors of the store's calls: errors as statuses, metrics, log lines and spans."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from adapter_store.api import call_context
from adapter_store.metrics.metrics import Metrics
from servicekit import errors
from servicekit.auth.authenticator import Authenticator
from servicekit.rpc.status import to_status
from servicekit.telemetry.recent_errors import RecentErrors, describe_bug
from servicekit.telemetry.tracing import Tracing, begin_call, end_call

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "adapter_store.loadout"
GONE_TEXT = "the caller has gone"
REQUEST_ID_KEY = "x-request-id"
"""Metadata by which a caller may name its call, for the log."""
POLLED_METHODS = frozenset({"GetAdapter", "ListAdapters", "ListVersions", "GetStoreStatus"})
"""Called often, and change nothing: logged only when they fail, traced only for callers that do."""
LONG_LIVED_METHODS = frozenset({"WatchAdapters"})
NOTHING: dict[str, object] = {"tenant": "", "adapter": "", "digest": ""}
"""Facts of every call's line, until they are known."""
TRACED_FACTS = ("request_id", "tenant", "adapter", "digest", "layout_id")
GRPC_PREFIX = "/grpc."
HEALTH_PREFIX = "/grpc.health."
QUIET_SECONDS = 0.5  # a caller whose call just ended may be sending the next
QUIET_LIMIT_SECONDS = 2.0  # some try again for ever
ABORT_SECONDS = 5.0


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Answers every error of a handler with its status, counts and logs every call, and knows which
    run. Where there is `tracing`, each is a span.

    A draining server answers new calls itself until nobody calls any more: those that arrive while
    grpc stops are dropped, and their callers would read CANCELLED.
    """

    def __init__(
        self,
        metrics: Metrics,
        recent_errors: RecentErrors | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics = metrics
        self._recent_errors = RecentErrors() if recent_errors is None else recent_errors
        self._tracing = tracing
        self._is_draining = False
        self._running = 0
        self._last_end = -QUIET_SECONDS

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new calls with UNAVAILABLE and waits for those that run, at most the grace; then
        goes on refusing until nobody calls any more, at most QUIET_LIMIT_SECONDS."""
        self._is_draining = True
        await _wait_while(lambda: self._running > 0, grace_seconds)
        await _wait_while(self._was_called_lately, QUIET_LIMIT_SECONDS)

    def _was_called_lately(self) -> bool:
        return time.monotonic() - self._last_end < QUIET_SECONDS

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(GRPC_PREFIX):
            return handler  # health and reflection answer to the end
        path = handler_call_details.method
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)
        serializer = handler.response_serializer
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        if handler.response_streaming and inspect.iscoroutinefunction(behaviour):
            # It yields nothing: it writes its responses itself, serialized.
            wrap, serializer = self._wrap_unary, None
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            wrap(path, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=serializer,
        )

    def _wrap_unary(self, path: str, behaviour: Callable[..., Awaitable[Any]]) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._watched(path, context):
                return await behaviour(request, context)

        return answer

    def _wrap_stream(self, path: str, behaviour: Callable[..., AsyncGenerator[Any]]) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any]:
            async with self._watched(path, context), aclosing(behaviour(request, context)) as rs:
                async for response in rs:
                    yield response

        return answer

    @asynccontextmanager
    async def _watched(self, path: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        start = time.monotonic()
        code, method = "OK", path.rpartition("/")[2]
        facts: dict[str, object] = {"method": method, "request_id": _request_id(context), **NOTHING}
        call_context.begin(facts)
        span = None
        if self._tracing is not None:
            span = begin_call(
                self._tracing,
                path,
                context.invocation_metadata() or (),
                polled=POLLED_METHODS,
                long_lived=LONG_LIVED_METHODS,
            )
        self._running += 1
        try:
            if self._is_draining:
                raise errors.Draining("the store is shutting down")
            yield
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except errors.ServiceError as error:
            status = to_status(error, ERROR_DOMAIN)
            code = code_pb2.Code.Name(status.code)
            call_context.note(reason=error.reason, why=str(error))
            await abort(context, status)
        except grpc.aio.InternalError:  # a message could not be sent: the caller has gone
            code = "CANCELLED"
            await abort(context, status_pb2.Status(code=code_pb2.CANCELLED, message=GONE_TEXT))
        except Exception as error:
            code = "INTERNAL"
            call_context.note(reason=code, why=describe_bug(error))
            logger.exception("call failed", extra={"method": method})
            await abort(context, to_status(error, ERROR_DOMAIN))
        finally:
            self._running -= 1
            self._last_end = time.monotonic()
            self._end(method, code, self._last_end - start, facts)
            if span is not None:
                span.set_attributes(**{key: str(facts.get(key, "")) for key in TRACED_FACTS})
                end_call(span, code, str(facts.get("reason", "")), context.time_remaining())

    def _end(self, method: str, code: str, seconds: float, facts: dict[str, object]) -> None:
        self._metrics.requests.labels(method, code).inc()
        self._metrics.request_seconds.labels(method).observe(seconds)
        reason = facts.get("reason")
        if reason is not None:
            self._metrics.rejections.labels(method, reason).inc()
            self._recent_errors.add({"code": code} | facts)
        level = logging.DEBUG if code == "OK" and method in POLLED_METHODS else logging.INFO
        if logger.isEnabledFor(level):
            message = "call finished" if reason is None else "call refused"
            extra = {**facts, "code": code, "seconds": round(seconds, 6)}
            logger.log(level, message, extra=extra)


def _request_id(context: grpc.aio.ServicerContext) -> str:
    """The caller's, or one of our own."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return value[: call_context.MAX_CHARS]
    return uuid.uuid4().hex


async def _wait_while(condition: Callable[[], bool], limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    while condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses who has no token that the policy knows, before a byte of what it sends is read: a
    message may be large. Health stays open: probes have none.

    `on_refused(method, peer, error)` hears of those whom it kept from our own service.
    """

    def __init__(
        self,
        authenticator: Authenticator[Any],
        on_refused: Callable[[str, str, errors.ServiceError], None],
    ) -> None:
        self._authenticator = authenticator
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or path.startswith(HEALTH_PREFIX):
            return handler
        try:
            self._authenticator.authenticate(handler_call_details.invocation_metadata)
        except errors.Unauthenticated as error:
            return self._refusing(path, error)
        return handler

    def _refusing(self, path: str, error: errors.ServiceError) -> grpc.RpcMethodHandler:
        """As a stream: of one nothing is read that is not asked for."""

        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            if not path.startswith(GRPC_PREFIX):
                self._on_refused(path.rpartition("/")[2], context.peer(), error)
            call_context.note(reason=error.reason)
            if path.startswith(GRPC_PREFIX):  # which nobody else watches
                logger.info("call refused", extra={"path": path, "reason": error.reason})
            await abort(context, to_status(error, ERROR_DOMAIN))

        return grpc.stream_stream_rpc_method_handler(refuse)


async def abort(context: grpc.aio.ServicerContext, status: status_pb2.Status) -> NoReturn:
    """Ends a call with this answer."""
    rich = rpc_status.to_status(status)
    # The answer leaves after what was sent before it; a reader that takes nothing gets it when it
    # reads on, but is not waited for.
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(rich.code, rich.details, rich.trailing_metadata)
    except TimeoutError:
        raise grpc.aio.AbortError from None
    raise AssertionError("abort returned")
