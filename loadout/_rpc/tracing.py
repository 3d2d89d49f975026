"""Calls as spans of the application's own OpenTelemetry.

There is one span per call, over all of its attempts, with an event for each retry. Services get it
as W3C's `traceparent`. It ends with the response, or when its stream has ended or been closed.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from loadout._rpc.calls import Call, Service, StreamCall
from loadout._rpc.route import Route, Trailers
from loadout.errors import Cancelled, InvalidArgument, LoadoutError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

SERVICES = {
    Service.STORE: "loadout.adapter_store.v1.AdapterStoreService",
    Service.INFERENCE: "loadout.inference.v1.InferenceService",
}
UNTRACED = "WatchAdapters"
"""Runs for as long as the client does: no span."""
CANCELLED = "loadout.cancelled"


class Tracing:
    """`provider` True is the global one. Raises InvalidArgument without OpenTelemetry."""

    def __init__(self, provider: TracerProvider | bool) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            raise InvalidArgument(
                "tracing: needs OpenTelemetry: pip install 'loadout[otel]'",
                code="INVALID_ARGUMENT",
                subject="tracing",
            ) from error
        self._trace = trace
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer(
            "loadout", tracer_provider=None if isinstance(provider, bool) else provider
        )

    def trace(self, route: Route, call: Call[Any] | StreamCall[Any]) -> Route:
        """Returns the call's route within a span, a child of the application's current one."""
        if call.rpc == UNTRACED:
            return route
        return self._start(route, call.service, call.rpc, {"loadout.adapter": call.adapter})

    def trace_upload(self, route: Route, rpc: str) -> Route:
        return self._start(route, Service.STORE, rpc, {})

    def _start(self, route: Route, service: Service, rpc: str, facts: dict[str, str]) -> Route:
        method = f"{SERVICES[service]}/{rpc}"
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        attributes.update({key: value for key, value in facts.items() if value})
        span = self._tracer.start_span(
            method, kind=self._trace.SpanKind.CLIENT, attributes=attributes
        )
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=self._trace.set_span_in_context(span))
        route.headers = tuple(headers.items())
        failed = self._trace.StatusCode.ERROR
        return TracedRoute(route, span, failed)


class TracedRoute:
    """A route whose span ends with its call. `failed` is the span status of an error."""

    def __init__(self, route: Route, span: Span, failed: Any) -> None:
        self._route = route
        self._span = span
        self._failed = failed
        self._num_attempts = 0
        self._failure: LoadoutError | None = None
        self._has_ended = False

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return self._route.headers

    @headers.setter
    def headers(self, headers: tuple[tuple[str, str], ...]) -> None:
        self._route.headers = headers

    @property
    def service(self) -> str:
        return self._route.service

    @property
    def resolving(self) -> Future[None] | None:
        return self._route.resolving

    @property
    def address(self) -> str:
        return self._route.address

    def send(self, request: Any, timeout: float | None) -> Any:
        self._num_attempts += 1
        if self._failure is not None:
            self._span.add_event(
                "retry",
                {"loadout.attempt": self._num_attempts, "error.type": _kind(self._failure)},
            )
            self._failure = None
        sent = self._route.send(request, timeout)
        if self._route.address:
            self._span.set_attribute("server.address", self._route.address)
        return sent

    def failed(self, failure: LoadoutError, trailers: Trailers) -> bool:
        self._failure = failure
        return self._route.failed(failure, trailers)

    def done(self, trailers: Trailers = None) -> None:
        self._route.done(trailers)
        if not self._has_ended:
            self._has_ended = True
            self._end(has_response=trailers is not None)

    def _end(self, *, has_response: bool) -> None:
        failure, code = self._failure, "OK" if has_response else "CANCELLED"
        if failure is not None:
            code = failure.code
        self._span.set_attribute("rpc.response.status_code", code)
        if self._num_attempts > 1:
            self._span.set_attribute("loadout.attempts", self._num_attempts)
        if isinstance(failure, Cancelled) or (failure is None and not has_response):
            self._span.set_attribute(CANCELLED, True)
        elif failure is not None:
            self._span.set_attribute("error.type", _kind(failure))
            self._span.set_status(self._failed, _kind(failure))
        self._span.end()


def _kind(failure: LoadoutError) -> str:
    """Returns a stable word: the text of an error may be anything."""
    return failure.reason or failure.code
