"""A running server's HTTP API, by OpenAI's client and a raw one; also of a model with tools, whose
answers a test writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import openai
from tokenizers import AddedToken

from inference_svc.api.http.serving.connections import ConnectionLimit
from inference_svc.text.tokenizer import Tokenizer
from tests.support.inference.serving import Running
from tests.support.models.templates import FAMILIES, TOOLED
from tests.support.models.tokenizers import byte_level, save_tokenizer
from tests.support.wait import until_async

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
BOTH = f'<think>\nhm\n</think>\n\nI look.\n{CALL}\n<tool_call>\n{{"name": "clock"}}\n</tool_call>'
"""Thoughts, a text, and two calls."""


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


def tooled_text(folder: Path) -> Tokenizer:
    """Returns a model's text of which some markers are special tokens."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<tool_call>"), AddedToken("</think>")])
    return Tokenizer(save_tokenizer(backend, folder, TOOLED["qwen3"]))


THINKING = ("<think>", "</think>")


def thinking_text(
    folder: Path, family: str = "qwen3", markers: tuple[str, ...] = THINKING
) -> Tokenizer:
    """Returns a model's text of which these markers are special tokens."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(each) for each in markers])
    return Tokenizer(save_tokenizer(backend, folder, {**FAMILIES, **TOOLED}[family]))


def serve_answers(serve_http: Any, text: Tokenizer) -> Any:
    """Returns a function as `serve_http`, whose engine gives these answers."""

    def run(body: Any, *answers: str, **options: Any) -> Any:
        async def scripted(front: Front) -> Any:
            front.engine.answers += [tuple(text.encode(each)) for each in answers]
            return await body(front)

        return serve_http(scripted, text=text, max_model_len=2048, **options)

    return run


def prompt_of(front: Front, text: Tokenizer) -> str:
    """Returns the last prompt, with special tokens."""
    return text.decode_all(front.engine.submitted[-1].prompt_token_ids)
