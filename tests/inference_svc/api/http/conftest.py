"""The HTTP API over a fake engine, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from inference_svc.text.tokenizer import Tokenizer
from tests.support.inference.front import Front, serve_answers, tooled_text
from tests.support.inference.serving import Running
from tests.support.servers.otlp import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


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


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A model with tools."""
    return tooled_text(tmp_path_factory.mktemp("tooled"))


@pytest.fixture
def serve_tools(serve_http: Callable[..., Any], tooled: Tokenizer) -> Any:
    """Like `serve_http`, for that model, whose engine gives answers that are arguments."""
    return serve_answers(serve_http, tooled)
