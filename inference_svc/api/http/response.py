"""A response in one JSON object: encoded while its deltas come, and sent as it is read.

Logprobs can be megabytes. Encoding them all at the end, or sending them at once, would block every
other request of this event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference_svc.api.http.sse import to_json
from inference_svc.core import FinishReason, TokenLogprobs
from inference_svc.engine.messages import Usage
from inference_svc.frontend.output_stream import Delta

PART_BYTES = 64 << 10
"""Sent before other requests may run."""

NO_USAGE = Usage(0, 0, 0)


class ChoiceFormatter(Protocol):
    """Formats one choice. Its logprobs are lists by name with an entry for each token, and the
    `logprob_constants`."""

    logprob_constants: Mapping[str, None]

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]: ...

    def full(self, choice: Choice) -> dict[str, Any]:
        """Returns the choice without its logprobs."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Returns None for a delta that has nothing to show yet."""
        ...


class Choice:
    """One choice's deltas joined, logprobs already encoded."""

    def __init__(self, formatter: ChoiceFormatter) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.usage = NO_USAGE
        self._formatter = formatter
        self._texts: list[str] = []
        self._logprobs: dict[str, list[bytes]] = {}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage or self.usage
        if delta.logprobs:
            for name, entries in self._formatter.logprobs(delta.logprobs).items():
                self._logprobs.setdefault(name, []).append(to_json(entries)[1:-1].encode())

    def to_json(self) -> bytes:
        lists = [
            b'"%s":[%s]' % (name.encode(), b",".join(entries))
            for name, entries in self._logprobs.items()
        ]
        lists += [b'"%s":null' % name.encode() for name in self._formatter.logprob_constants]
        logprobs = b"{%s}" % b",".join(lists) if self._logprobs else b"null"
        return b'%s,"logprobs":%s}' % (to_json(self._formatter.full(self)).encode()[:-1], logprobs)


class FullResponse(Response):
    """A JSON response made of parts."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        self._parts = parts
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        num_bytes = 0
        for part in self._parts:
            for begin in range(0, len(part), PART_BYTES):
                body = part[begin : begin + PART_BYTES]
                await send({"type": "http.response.body", "body": body, "more_body": True})
                num_bytes += len(body)
                if num_bytes >= PART_BYTES:
                    num_bytes = 0
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
