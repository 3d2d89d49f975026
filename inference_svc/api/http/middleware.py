"""Around all routes: what is counted, how many requests run, and what every answer tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.api.http.errors import CLIENT_GONE, error_of, is_known, status_of
from inference_svc.api.http.request import REQUEST_ID_HEADER
from inference_svc.api.load_report import LOAD_HEADER
from inference_svc.debug.last_errors import CallEnd
from servicekit.telemetry.spans import CANCELLED, OpenSpan, set_current
from servicekit.telemetry.tracing import Tracing

OTHER = "other"
METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}
)
"""A caller may make up others, as long as it likes."""
QUIET = frozenset({"/health", "/metrics", OTHER})
"""Asked for by machines all the time, or by whoever guesses."""


class Counting:
    """An application that tells `on_end` of each request that ended: its route, its status, the
    error that ended it, and the id that its caller gave it. The status says how it ended: a stream
    may begin well, and fail. `routes` are paths; one with a "{" stands for all that begin with what
    is before it. Every answer has the `load` that there is when it begins, as a header: trailers
    are nothing that clients and proxies of HTTP/1.1 read. Where there is `tracing`, each request is
    a span, but for those of QUIET routes and of strangers, who leave no trace."""

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

        async def note(message: Message) -> None:
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
            await self._app(scope, receive, note)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
            status = status_of(scope, sent)
            given = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"")
            end = CallEnd.of(route, str(status), error_of(scope), given.decode("latin-1"))
            self._on_end(end)
            if span is not None and is_known(scope):
                _end(span, status, sent, end.reason)

    async def drain(self, grace_seconds: float) -> None:
        """Returns when nothing runs, or after the grace."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(0.0, grace_seconds))

    def _route(self, path: str) -> str:
        if path in self._plain:
            return path
        found = (route for prefix, route in self._prefixes.items() if path.startswith(prefix))
        return next(found, OTHER)


def _begin(tracing: Tracing, scope: Scope, route: str) -> OpenSpan:
    """The current span from now on."""
    headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
    method = scope["method"] if scope["method"] in METHODS else ""
    span = tracing.begin(f"{method or 'HTTP'} {route}", headers)
    span.attributes.update({"http.request.method": method or "_OTHER", "http.route": route})
    set_current(span)
    return span


def _end(span: OpenSpan, status: int, sent: int | None, reason: str) -> None:
    """What the client could mend, and that it left, is no error of ours."""
    span.set_attributes(reason=reason)
    if status == CLIENT_GONE:
        span.attributes[CANCELLED] = True
    if sent not in (None, CLIENT_GONE):
        span.attributes["http.response.status_code"] = sent
    if status >= 500:
        span.error = reason or str(status)
    span.end()
