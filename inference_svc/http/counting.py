"""Around all routes: what is counted, how many requests run, and what every answer tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.http.reading import REQUEST_ID_HEADER
from inference_svc.http.statuses import CLIENT_GONE
from inference_svc.load import LOAD_HEADER

OTHER = "other"


OnEnd = Callable[[str, int, Exception | None, str], None]


class Counting:
    """An application that tells `on_end(route, status, error, request_id)` of each request that
    ended, with the error that it was answered with, and the id that its caller gave it, "" if it
    gave none. `routes` are paths; one with a "{" stands for all that begin
    with what is before it. Every answer has the `load` that there is when it begins, as a header:
    trailers are nothing that clients and proxies of HTTP/1.1 read."""

    def __init__(
        self, app: ASGIApp, routes: list[str], on_end: OnEnd, load: Callable[[], str]
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._load = load
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
                header = (LOAD_HEADER.encode(), self._load().encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, note)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
            error = scope.get("state", {}).get("error")
            given = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"")
            self._on_end(self._route(scope["path"]), status, error, given.decode("latin-1"))

    async def drain(self, grace_seconds: float) -> None:
        """Returns when nothing runs, or after the grace."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(0.0, grace_seconds))

    def _route(self, path: str) -> str:
        if path in self._plain:
            return path
        found = (route for prefix, route in self._prefixes.items() if path.startswith(prefix))
        return next(found, OTHER)
