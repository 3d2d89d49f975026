"""The interceptors of the service's calls: errors as statuses, load, metrics and spans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_status import rpc_status

from inference_svc.api.load_report import LOAD_HEADER, REFUSED_HEADER
from inference_svc.errors import PROMPT_SUBJECTS, QueueFull
from servicekit import errors
from servicekit.auth.authenticator import Authenticator
from servicekit.rpc.status import code_for, to_status
from servicekit.telemetry.recent_errors import CallEnd
from servicekit.telemetry.tracing import Tracing, begin_call, end_call

log = logging.getLogger(__name__)

DOMAIN = "inference.loadout"
PACKAGE_PREFIX = "/loadout.inference."
POLLED_METHODS = frozenset({"GetServerInfo", "ListResidentAdapters"})
"""Called every second by monitoring: traced only for callers that do."""
HEALTH_PREFIX = "/grpc.health."
QUIET_SECONDS = 0.5  # a caller whose call just ended may be sending the next
QUIET_LIMIT_SECONDS = 2.0  # some try again for ever

ELSEWHERE = (errors.Draining, QueueFull)
"""What another replica may take: nothing was done here."""


def code_of(error: BaseException) -> str:
    """The name of the code that a call ends with when its handler raises this."""
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.InternalError):
        return code_for(type(error)).name
    return "CANCELLED"  # the caller has gone


Handler = Callable[[Any, Any], Awaitable[Any]]
Load = Callable[[], str]
"""The value of LOAD_HEADER, now."""


class Health(health.aio.HealthServicer):
    """Tells those who check the load, too."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata(_trailers(self._load))
        return await super().Check(request, context)


def _trailers(load: Load) -> tuple[tuple[str, str], ...]:
    return ((LOAD_HEADER, load()),)


def _refused(error: Exception) -> tuple[tuple[str, str], ...]:
    return ((REFUSED_HEADER, error.reason),) if isinstance(error, ELSEWHERE) else ()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Answers every error of our services with its status, and every call with the load.

    `on_end` is told how each call ended ("OK", "NOT_FOUND", ...). Our streaming handlers are
    coroutines that write, so that one wrapper serves unary and streaming. Where there is `tracing`,
    each call is a span.
    """

    def __init__(
        self, on_end: Callable[[CallEnd], None], load: Load, tracing: Tracing | None = None
    ) -> None:
        self._on_end = on_end
        self._load = load
        self._tracing = tracing
        self._running = 0
        self._last_end = -QUIET_SECONDS

    async def drain(self, grace_seconds: float) -> None:
        """Returns when nothing runs, or after the grace; and when then nobody has called for
        QUIET_SECONDS, or after QUIET_LIMIT_SECONDS. Calls that arrive while grpc stops are dropped,
        and their callers would read CANCELLED; a draining server therefore answers until then."""
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
        method: str = handler_call_details.method
        if handler is None or not method.startswith(PACKAGE_PREFIX):
            return handler
        if handler.unary_unary is not None:
            make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        else:
            make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        return make(
            self._guard(method, inner),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard(self, path: str, inner: Handler) -> Handler:
        name = path.rpartition("/")[2]

        async def guarded(request: Any, context: Any) -> Any:
            code, failure = "OK", None
            span = None
            if self._tracing is not None:
                headers = context.invocation_metadata()
                span = begin_call(self._tracing, path, headers, polled=POLLED_METHODS)
            self._running += 1
            try:
                answer = await inner(request, context)
                context.set_trailing_metadata(_trailers(self._load))
                return answer
            except grpc.aio.AbortError:
                code = context.code().name
                raise
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except grpc.aio.InternalError:  # a message could not be sent: the caller has gone
                code = "CANCELLED"
                await context.abort(grpc.StatusCode.CANCELLED, "the caller has gone")
            except Exception as error:
                code, failure = code_for(type(error)).name, error
                if code == "INTERNAL":
                    log.exception("%s failed", name)
                refusal = rpc_status.to_status(to_status(error, DOMAIN))
                trailers = (*refusal.trailing_metadata, *_trailers(self._load), *_refused(error))
                await context.abort(refusal.code, refusal.details, trailers)
            finally:
                self._running -= 1
                self._last_end = time.monotonic()
                request_id = getattr(request, "request_id", "")
                end = CallEnd.of(name, code, failure, request_id, private_subjects=PROMPT_SUBJECTS)
                self._on_end(end)
                if span is not None:
                    end_call(span, code, end.reason, context.time_remaining())

        return guarded


async def _wait_while(condition: Callable[[], bool], limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    while condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses who has no token that the policy knows, before a byte of what it sends is read.
    Health stays open: probes have none.

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
            if path.startswith(PACKAGE_PREFIX):
                self._on_refused(path.rpartition("/")[2], context.peer(), error)
            await context.abort_with_status(rpc_status.to_status(to_status(error, DOMAIN)))

        return grpc.stream_stream_rpc_method_handler(refuse)
