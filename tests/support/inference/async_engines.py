"""The front end's engine over any engine, and requests to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from inference_svc.core import Request
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.frontend.output_stream import Delta
from servicekit.shares import Shares
from tests.support.inference.results import asking


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await body()

    return asyncio.run(bounded())


def make_async_engine(engine: Any, tokenizer: Any) -> AsyncEngine:
    async_engine = AsyncEngine(engine, tokenizer, Shares("unread_bytes", 64 << 20))
    async_engine.start()
    return async_engine


def make_request(tokenizer: Any, text: str, request_id: str = "r", **sampling: Any) -> Request:
    prompt, asked = tuple(tokenizer.encode(text)), asking({"max_tokens": 1000, **sampling})
    return Request(request_id, prompt, arrival_s=time.monotonic(), **asked)


async def collect(async_engine: AsyncEngine, request: Request, tenant: str = "") -> list[Delta]:
    async with aclosing(async_engine.generate(request, tenant)) as deltas:
        return [delta async for delta in deltas]
