"""Around all routes: counts and traces requests, and adds the load to responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.api.http.errors import (
    CLIENT_CLOSED_REQUEST,
    error_of,
    forget_error,
    is_authenticated,
    status_of,
)
from inference_svc.api.http.request import REQUEST_ID_HEADER
from inference_svc.api.load_report import LOAD_HEADER
from inference_svc.errors import PROMPT_SUBJECTS
from servicekit.telemetry.recent_errors import CallEnd
from servicekit.telemetry.spans import CANCELLED, OpenSpan, set_current
from servicekit.telemetry.tracing import Tracing

OTHER = "other"
METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}
)
"""Others, which callers may invent, share one label."""
QUIET = frozenset({"/health", "/metrics", OTHER})
"""Routes that are polled, and unknown ones: not traced."""


class RequestMiddleware:
    """Wraps an application. Calls `on_end` for each request with its route, status, error and the
    caller's id; the status is how the request ended, though a stream may have begun well. `routes`
    are paths; one with a "{" stands for all with the prefix before it. Every response has the
    current `load` as a header: clients and proxies of HTTP/1.1 read no trailers. With `tracing`,
    each request is a span, except for QUIET routes and callers that are not authenticated."""

    def __init__(
        self,
        app: ASGIApp,
        routes: list[str],
        on_end: Callable[[CallEnd], None],
        load: Callable[[], str],
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._load = load
        self._tracing = tracing
        self._plain = {route for route in routes if "{" not in route}
        self._prefixes = {route.partition("{")[0]: route for route in routes if "{" in route}
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: int | None = None

        async def send_with_load(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
                header = (LOAD_HEADER.encode(), self._load().encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        route = self._route(scope["path"])
        span = None
        if self._tracing is not None and route not in QUIET:
            span = _begin(self._tracing, scope, route)
        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send_with_load)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
            status = status_of(scope, sent)
            request_id = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"")
            end = CallEnd.of(
                route,
                str(status),
                error_of(scope),
                {"request_id": request_id.decode("latin-1")},
                private_subjects=PROMPT_SUBJECTS,
            )
            self._on_end(end)
            forget_error(scope)
            if span is not None and is_authenticated(scope):
                _end(span, status, sent, end.reason)

    async def drain(self, grace_seconds: float) -> None:
        """Returns when no request runs, or after the grace."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(0.0, grace_seconds))

    def _route(self, path: str) -> str:
        if path in self._plain:
            return path
        found = (route for prefix, route in self._prefixes.items() if path.startswith(prefix))
        return next(found, OTHER)


def _begin(tracing: Tracing, scope: Scope, route: str) -> OpenSpan:
    """Starts a span and makes it the current one."""
    headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
    method = scope["method"] if scope["method"] in METHODS else ""
    span = tracing.begin(f"{method or 'HTTP'} {route}", headers)
    span.attributes.update({"http.request.method": method or "_OTHER", "http.route": route})
    set_current(span)
    return span


def _end(span: OpenSpan, status: int, sent: int | None, reason: str) -> None:
    """Ends the span; the client's mistakes and its disconnect are no errors of ours."""
    span.set_attributes(reason=reason)
    if status == CLIENT_CLOSED_REQUEST:
        span.attributes[CANCELLED] = True
    if sent not in (None, CLIENT_CLOSED_REQUEST):
        span.attributes["http.response.status_code"] = sent
    if status >= 500:
        span.error = reason or str(status)
    span.end()
