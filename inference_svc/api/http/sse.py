"""A response of server-sent events, each sent as it is made."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference_svc.api.http.errors import (
    INTERNAL,
    ErrorForm,
    Names,
    as_it_is,
    error_object,
    set_disconnected,
    set_error,
)
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

# One encoder: `json.dumps` would make one for every token.
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


def to_event(content: Mapping[str, Any]) -> bytes:
    return f"data: {to_json(content)}\n\n".encode()


class EventStream(Response):
    """`events` are encoded events. An error before the first one gets a status of its own, a later
    one becomes the last event. `names` are the route's, and so is the `form` of its errors."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        names: Names,
        headers: Mapping[str, str],
        form: ErrorForm = as_it_is,
    ) -> None:
        self._events = events
        self._names = names
        self._form = form
        self._has_begun = False
        self.status_code = 200
        self.background = None
        # Proxies that buffer would hold tokens back.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._write(scope, send))
        except ClientDisconnect:
            if not self._has_begun:
                raise
            set_disconnected(scope)

    async def _write(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            self._has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await send(_part(first))
            try:
                async for event in events:
                    await send(_part(event))
            except Exception as error:
                set_error(scope, error)
                await send(_part(self._error_event(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error_event(self, error: Exception) -> bytes:
        status, content = error_object(error, self._names)
        if status is INTERNAL and not isinstance(error, ServiceError):
            logger.error("a stream failed", exc_info=error)
        formed = self._form(status.status, content)
        kind = f"event: {formed['type']}\n".encode() if "type" in formed else b""
        return kind + to_event(formed)


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
