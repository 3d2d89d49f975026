"""The HTTP API over a fake engine, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from tests.inference_svc.serving import Running
from tests.support.otlp import Receiver
from tests.support.wait import until_async


class Front:
    """A running server, and clients of its HTTP API: OpenAI's, and a raw one."""

    def __init__(self, running: Running, raw: httpx2.AsyncClient) -> None:
        self.running, self.engine, self.raw = running, running.engine, raw
        self.client = self.connect("none")

    def connect(self, token: str) -> openai.AsyncOpenAI:
        url = f"http://{self.running.server.http_address}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0)

    async def until_metric(self, line: str) -> None:
        """Waits for a line of the metrics: a call is counted after its client has seen the end."""

        async def is_there() -> bool:
            return line in await asyncio.to_thread(self.running.scrape)

        await until_async(is_there)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return await self.raw.post(path, json=body, **options)

    async def complete(self, prompt: Any = "abc", **fields: Any) -> Any:
        fields.setdefault("model", "base")
        return await self.client.completions.create(prompt=prompt, **fields)

    async def chat(self, content: Any = "hi", **fields: Any) -> Any:
        fields.setdefault("model", "base")
        fields.setdefault("messages", [{"role": "user", "content": content}])
        return await self.client.chat.completions.create(**fields)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


def traced(receiver: Receiver) -> dict[str, Any]:
    """Settings that send it every span, at the latest when the server has ended."""
    return {"otlp_endpoint": receiver.endpoint, "trace_sample_ratio": 1.0}


@pytest.fixture
def serve_http(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Like `serve`, for a coroutine function of a Front. uvicorn, which ends by looking ten times a
    second whether its connections are closed, looks more often."""
    quick = SimpleNamespace(**{**vars(asyncio), "sleep": lambda delay: asyncio.sleep(delay / 10)})
    monkeypatch.setattr("uvicorn.server.asyncio", quick)

    def run(body: Callable[[Front], Awaitable[Any]], **options: Any) -> Any:
        async def main(running: Running) -> Any:
            address = running.server.http_address
            async with httpx2.AsyncClient(
                base_url=f"http://{address}", timeout=60, verify=False
            ) as raw:
                front = Front(running, raw)
                async with front.client:
                    return await body(front)

        return serve(main, http=True, **options)

    return run
