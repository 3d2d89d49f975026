"""An answer to a request whose body nobody wants."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

LINGER_BYTES = 8 << 20
LINGER_SECONDS = 1.0


class UnreadRefusal(JSONResponse):
    """Ends the connection. What the client still sends is thrown away for a while: to close over
    it would reset the connection, and the client might never see the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes, is_over = 0, False
    while not is_over and num_bytes < LINGER_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_over = not message.get("more_body", False)
