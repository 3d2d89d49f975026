"""Around all routes: what is counted, and how many requests run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.http.statuses import CLIENT_GONE
from inference_svc.spans import CANCELLED, OpenSpan, enter
from inference_svc.tracing import Tracing

OTHER = "other"
QUIET = frozenset({"/health", "/metrics", OTHER})
"""Asked for by machines all the time, or by whoever guesses."""


class Counting:
    """An application that tells `on_end(route, status, reason)` of each request that ended, with
    the reason of the error that it was answered with, or "". `routes` are paths; one with a "{"
    stands for all that begin with what is before it. Where there is `tracing`, each request is a
    span, but for those of QUIET routes."""

    def __init__(
        self,
        app: ASGIApp,
        routes: list[str],
        on_end: Callable[[str, int, str], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._tracing = tracing
        self._plain = {route for route in routes if "{" not in route}
        self._prefixes = {route.partition("{")[0]: route for route in routes if "{" in route}
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_GONE

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
            reason = scope.get("state", {}).get("reason", "")
            self._on_end(route, status, reason)
            if span is not None:
                _end(span, status, reason)

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
    span = tracing.begin(f"{scope['method']} {route}", headers)
    span.attributes.update({"http.request.method": scope["method"], "http.route": route})
    enter(span)
    return span


def _end(span: OpenSpan, status: int, reason: str) -> None:
    """What the client could mend, and that it left, is no error of ours. Strangers leave no
    trace."""
    if status == 401:
        return
    span.note(reason=reason)
    if status == CLIENT_GONE:
        span.attributes[CANCELLED] = True
    else:
        span.attributes["http.response.status_code"] = status
    if status >= 500:
        span.error = reason or str(status)
    span.end()
