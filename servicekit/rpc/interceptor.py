"""The interceptors of a service's own calls: tokens, bounds, statuses, log lines, spans and
drain."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.rpc import status_pb2
from grpc_reflection.v1alpha import reflection_pb2

from servicekit.auth.authenticator import Authenticator
from servicekit.errors import Draining, ServiceError, Unauthenticated
from servicekit.rpc import call_context
from servicekit.rpc.call import Call, Serialize, Trailers, abort
from servicekit.rpc.places import CALLER, IS_KNOWN, CallPlaces, wait_for
from servicekit.rpc.requests import RequestBounds, RequestReader, RequestTable, largest_request
from servicekit.rpc.status import code_for, service_error, to_status
from servicekit.telemetry.recent_errors import CallEnd
from servicekit.telemetry.spans import OpenSpan
from servicekit.telemetry.tracing import Tracing, begin_call, end_call

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
"""Metadata by which a caller may name its call, for the log."""
GRPC_PREFIX = "/grpc."
HEALTH_PREFIX = "/grpc.health."
REFLECTION = RequestBounds(reflection_pb2.ServerReflectionRequest, max_running=16)
QUIET_SECONDS = 0.5  # a caller whose call just ended may be sending the next
QUIET_LIMIT_SECONDS = 2.0  # some try again for ever
GONE_TEXT = "the caller has left"

Handler: TypeAlias = Callable[[Any, Any], Any]
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


def _no_trailers(error: Exception | None) -> Trailers:
    return ()


@dataclass(frozen=True, slots=True)
class CallRules:
    """How a service's calls are bounded, logged, traced and answered.

    `requests` has the bounds of every method's messages; a method without them is not served.
    `polled` methods are called often and change nothing: logged only when they fail, traced only
    for callers that do. `long_lived` ones are never traced; handlers of `logged_elsewhere` ones log
    their calls themselves. Each log line has the `facts`, "" until they are known; spans have
    `traced_facts`. Messages about `private` subjects are not written down. A service that does not
    `refuse_when_draining` does so itself. `trailers` are sent with every answer, given its error.
    Handlers may write bytes, of messages that they have serialized.
    """

    domain: str
    requests: RequestTable
    polled: frozenset[str] = frozenset()
    long_lived: frozenset[str] = frozenset()
    logged_elsewhere: frozenset[str] = frozenset()
    facts: tuple[str, ...] = ()
    traced_facts: tuple[str, ...] = ()
    private: frozenset[str] = frozenset()
    refuse_when_draining: bool = True
    trailers: Callable[[Exception | None], Trailers] = _no_trailers


@dataclass(frozen=True, slots=True)
class _Served:
    """A method as it is served. `serialize` None: its answers are bytes. `takes_stream`: its
    handler takes a stream of messages."""

    path: str
    behaviour: Handler
    bounds: RequestBounds
    serialize: Serialize | None
    takes_stream: bool


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Answers every error of a handler with its status, logs every call, and knows which run. With
    `tracing`, each is a span. `on_end` is called with how each call ended.

    A draining server answers new calls until none come any more, because calls that arrive while
    grpc stops are dropped, and their callers would read CANCELLED.
    """

    def __init__(
        self,
        rules: CallRules,
        places: CallPlaces,
        on_end: Callable[[CallEnd], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._rules = rules
        self._places = places
        self._on_end = on_end
        self._tracing = tracing
        self._requests = RequestReader(places, largest_request(rules.requests))
        self._is_draining = False
        self._running = 0
        self._last_end = -QUIET_SECONDS

    async def drain(self, grace_seconds: float) -> None:
        """Waits for the calls that run, at most the grace; then until no call has come for
        QUIET_SECONDS, at most QUIET_LIMIT_SECONDS."""
        self._is_draining = True
        await _wait_while(lambda: self._running > 0, grace_seconds)
        await _wait_while(self._was_called_lately, QUIET_LIMIT_SECONDS)

    def _was_called_lately(self) -> bool:
        return time.monotonic() - self._last_end < QUIET_SECONDS

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        path: str = handler_call_details.method
        if handler is None or path.startswith(HEALTH_PREFIX):
            return handler
        if path.startswith(GRPC_PREFIX):
            is_refusal = inspect.iscoroutinefunction(handler.stream_stream)
            return handler if is_refusal else self._bounded_reflection(handler)
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        method = _Served(
            path,
            getattr(handler, kind),
            self._rules.requests[_method(path)],
            handler.response_serializer,
            handler.request_streaming,
        )
        # Nothing of a stream is read, nor held by gRPC, before it is asked for.
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(self._wrap_unary(method))
        return grpc.stream_stream_rpc_method_handler(self._wrap_stream(method))

    def _wrap_unary(self, method: _Served) -> Handler:
        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> bytes:
            raw = b""
            async with self._observed(method, context) as call:
                await self._enter(method, call)
                # The handler alone holds the message, so that it can let go of it.
                response = await method.behaviour(await self._read(method, call), call)
                raw = call.last(response)
            await call.end()
            return raw

        return answer

    def _wrap_stream(self, method: _Served) -> Handler:
        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> None:
            async with self._observed(method, context) as call:
                await self._enter(method, call)
                if inspect.iscoroutinefunction(method.behaviour):  # it writes its responses
                    await method.behaviour(await self._read(method, call), call)
                else:
                    request = await self._read(method, call)
                    async with aclosing(method.behaviour(request, call)) as responses:
                        del request
                        async for response in responses:
                            await call.write(response)
            await call.end()

        return answer

    def _bounded_reflection(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Answers also while the server drains, as health does, and is neither logged nor
        counted."""

        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> None:
            call = Call(context, handler.response_serializer, self._places.pace)
            try:
                with await self._places.turn("reflection", REFLECTION.max_running):
                    read = self._requests.read_stream(call, REFLECTION)
                    async with aclosing(handler.stream_stream(read, call)) as responses:
                        async for response in responses:
                            await call.write(response)
            except ServiceError as error:
                call.refuse(to_status(error, self._rules.domain), ())
            await call.end()

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _read(self, method: _Served, call: Call) -> Any:
        """Returns the argument of the method's handler: the message of the call, or a stream of
        them."""
        if method.takes_stream:
            return self._requests.read_stream(call, method.bounds)
        call.request_place = await self._requests.place()
        request = await self._requests.read(call, method.bounds, call.request_place)
        call_context.note(request_id=getattr(request, "request_id", ""))
        return request

    async def _enter(self, method: _Served, call: Call) -> None:
        """Takes the places that a call of this method needs before it is read. Raises Draining,
        ShareExceeded."""
        if self._is_draining and self._rules.refuse_when_draining:
            raise Draining("the service is shutting down")
        bounds = method.bounds
        if bounds.max_running:
            call.turn = await self._places.turn(_method(method.path), bounds.max_running)
        call.answer_place = await wait_for(self._places.answer_bytes, bounds.answer_bytes)

    @asynccontextmanager
    async def _observed(
        self, method: _Served, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Call]:
        """Yields the call. Its errors become its refusal, with which it is to be ended: a reader
        that has not taken earlier messages is nothing to wait for here."""
        path = method.path
        start = time.monotonic()
        code, failure = "OK", None
        facts = {"request_id": _request_id(context)} | dict.fromkeys(self._rules.facts, "")
        call_context.begin(facts)
        span = self._begin_span(path, context)
        call = Call(context, method.serialize, self._places.pace)
        self._running += 1
        try:
            yield call
            if trailers := self._rules.trailers(None):
                context.set_trailing_metadata(trailers)
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.InternalError:  # a message could not be sent: the caller has gone
            code = "CANCELLED"
            number = grpc.StatusCode.CANCELLED.value[0]
            call.refuse(status_pb2.Status(code=number, message=GONE_TEXT), ())
        except Exception as raised:
            error = service_error(raised)
            code, failure = code_for(type(error)).name, error
            if error is not raised:
                logger.error("out of a resource", exc_info=raised, extra={"method": _method(path)})
            if code == "INTERNAL":
                logger.exception("call failed", extra={"method": _method(path)})
            call.refuse(to_status(error, self._rules.domain), self._rules.trailers(error))
        finally:
            call.leave()
            self._running -= 1
            self._last_end = time.monotonic()
            end = CallEnd.of(
                _method(path),
                code,
                failure,
                facts,
                self._last_end - start,
                private_subjects=self._rules.private,
            )
            self._report(end, facts, span, context)
            if failure is not None:  # whose frames have the request, and this one has the failure
                failure.__traceback__ = None

    def _begin_span(self, path: str, context: grpc.aio.ServicerContext) -> OpenSpan | None:
        if self._tracing is None:
            return None
        headers = context.invocation_metadata() or ()
        polled, long_lived = self._rules.polled, self._rules.long_lived
        return begin_call(self._tracing, path, headers, polled=polled, long_lived=long_lived)

    def _report(
        self,
        end: CallEnd,
        facts: Mapping[str, str],
        span: OpenSpan | None,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Counts, logs and traces a call that has ended."""
        self._on_end(end)
        self._log(end)
        if span is not None:
            span.set_attributes(**{key: facts.get(key, "") for key in self._rules.traced_facts})
            end_call(span, end.code, end.reason, context.time_remaining())

    def _log(self, end: CallEnd) -> None:
        # Calls without a known token never reach the handler that would log them.
        if end.method in self._rules.logged_elsewhere and end.code != "UNAUTHENTICATED":
            return
        is_quiet = end.code == "OK" and end.method in self._rules.polled
        level = logging.DEBUG if is_quiet else logging.INFO
        if logger.isEnabledFor(level):
            facts: dict[str, object] = {"method": end.method, **end.facts, "code": end.code}
            if end.reason:
                facts |= {"reason": end.reason, "why": end.message}
            message = "call refused" if end.reason else "call finished"
            logger.log(level, message, extra=facts | {"seconds": round(end.seconds, 6)})


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers without a token that the policy knows, before a byte of their messages is
    read, because these may be large. Health stays open: probes have no token.

    Runs inside a CallInterceptor. `on_refused(method, peer, error)` is called for a service's own
    methods.
    """

    def __init__(
        self,
        authenticator: Authenticator[Any],
        domain: str,
        on_refused: Callable[[str, str, ServiceError], None],
    ) -> None:
        self._authenticator = authenticator
        self._domain = domain
        self._on_refused = on_refused

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        path: str = handler_call_details.method
        if handler is None or path.startswith(HEALTH_PREFIX):
            return handler
        try:
            metadata = handler_call_details.invocation_metadata
            CALLER.set(self._authenticator.authenticate(metadata).account)
            IS_KNOWN.set(True)
        except Unauthenticated as error:
            return self._refusing(path, error)
        return handler

    def _refusing(self, path: str, error: ServiceError) -> grpc.RpcMethodHandler:
        """Returns a handler of streams: nothing of a stream is read before it is needed."""

        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            call_context.note(peer=context.peer())
            if path.startswith(GRPC_PREFIX):  # the CallInterceptor leaves these alone
                logger.info("call refused", extra={"path": path, "reason": error.reason})
                await abort(context, to_status(error, self._domain))
            self._on_refused(_method(path), context.peer(), error)
            raise error

        return grpc.stream_stream_rpc_method_handler(refuse)


def code_name(error: BaseException) -> str:
    """Returns the name of the code that a call ends with when its handler raises this."""
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.InternalError):
        return code_for(type(service_error(error))).name
    return "CANCELLED"  # the caller has gone


def _method(path: str) -> str:
    return path.rpartition("/")[2]


def _request_id(context: grpc.aio.ServicerContext) -> str:
    """Returns the caller's name for the call, or a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return value[: call_context.MAX_CHARS]
    return uuid.uuid4().hex


async def _wait_while(condition: Callable[[], bool], limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    while condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
