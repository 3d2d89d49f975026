"""A running server's HTTP API, by OpenAI's client and a raw one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai

from inference_svc.api.http.serving.connections import ConnectionLimit
from tests.support.inference.serving import Running
from tests.support.wait import until_async


class Front:
    """A running server, and clients of its HTTP API: OpenAI's, and a raw one."""

    def __init__(self, running: Running, raw: httpx2.AsyncClient) -> None:
        self.running, self.engine, self.raw = running, running.engine, raw
        self.client = self.connect("none")

    @property
    def connections(self) -> ConnectionLimit:
        assert self.running.server.http is not None
        return self.running.server.http.limit

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
