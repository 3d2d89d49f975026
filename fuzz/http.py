"""Fuzzes requests over HTTP, from a path and a body to the requests that an engine would get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from fuzz.refusals import TALLY
from fuzz.requests import BASE_MODEL, MODEL_LEN, RULE, VOCABULARY, requests_of
from inference_svc.api.http.app import make_app
from inference_svc.api.http.errors import INTERNAL_MESSAGE
from inference_svc.api.http.pooling.route import IncomingPool
from inference_svc.api.http.serving.middleware import RequestMiddleware
from inference_svc.api.server_facts import ServerFacts
from inference_svc.errors import QueueFull
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.routed_experts import ExpertLayers
from servicekit.shares import Shares

SEPARATOR = b"\xff\xff\xff\xff"
MAX_BODY_BYTES = 1 << 16


def fuzz_http(data: bytes) -> None:
    """Sends a request: its method, a space, its path with the query, a separator and its body.

    Every request is answered, and never with an internal error; a valid request would be queued.
    """
    head, _, body = data.partition(SEPARATOR)
    method, _, target = head.partition(b" ")
    path, _, query = target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.decode("latin-1"),
        "path": path.decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "scheme": "http",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("192.0.2.1", 1),
        "server": ("192.0.2.2", 80),
        "state": {"connection": _Connection()},
    }
    status, answer = _loop().run_until_complete(_answer(scope, body[:MAX_BODY_BYTES]))
    assert 200 <= status < 600
    assert INTERNAL_MESSAGE.encode() not in answer, "the answer is an internal error"
    if status >= 400:
        error = json.loads(answer)["error"]
        assert error["message"]
        assert len(answer) < 16_384
    read = status in (200, 429)
    TALLY.accepted += read
    TALLY.refused += not read


async def _answer(scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of the answer."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client waits for its answer
        return unread.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await _app()(scope, receive, send)
    start = next(each for each in sent if each["type"] == "http.response.start")
    parts = (each.get("body", b"") for each in sent if each["type"] == "http.response.body")
    return int(start["status"]), b"".join(map(bytes, parts))


class _Connection:
    """A connection with the methods that requests call."""

    def admit(self, account: str) -> None: ...

    @contextlib.contextmanager
    def reading_body(self) -> Iterator[None]:
        yield

    def linger(self, is_known: bool) -> None:
        """Does nothing: no client sends more."""


class _Service:
    """The use cases without an engine: each call is refused after its conversion."""

    has_store = True
    layout_id = "sha256:" + "0" * 64
    facts = ServerFacts(
        base_model=BASE_MODEL,
        architecture="llama",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        vocab_size=VOCABULARY,
        max_model_len=MODEL_LEN,
        max_loras=4,
        max_lora_rank=64,
        max_sequences=8,
        max_batch_tokens=64,
        max_queue=8,
        eos_token_ids=(2,),
        experts=ExpertLayers((0,), 1, 4),
        embedding=RULE,
        classifier=ClassifierRule(("a", "b")),
    )

    def __init__(self) -> None:
        self._parsers = ThreadPoolExecutor(1, "parser")
        self._caller: Any = SimpleNamespace(
            account="tenant", home_tenant="default", tenants=None, name="caller"
        )
        self.access = self.residents = self.life_cycle = self

    def authorize(self, *_asked: object) -> Any:
        return self._caller

    authorize_change = authorize

    async def generate(self, caller: Any, incoming: Any) -> Any:
        incoming.accept(self._caller)
        call = await incoming.read(self._parsers)
        is_pooled = isinstance(incoming, IncomingPool)
        assert (incoming.answer if is_pooled else incoming.options) is not None
        requests_of(call)
        raise self._full()

    async def load(self, caller: Any, ref: str, **fields: Any) -> Any:
        source = fields["source"]
        if source is not None:
            source.uri.encode()
        raise self._full()

    async def unload(self, caller: Any, ref: str, **fields: Any) -> Any:
        raise self._full()

    async def pause(self, caller: Any, mode: Any, resume_after_s: float) -> int:
        assert 0 <= resume_after_s <= 86_400
        return 0

    async def resume(self, caller: Any) -> None: ...

    async def sleep(self, caller: Any, *, frees_weights: bool) -> int:
        return int(frees_weights)

    async def wake(self, caller: Any) -> float:
        return 0.0

    async def reset_prefix_cache(self, caller: Any) -> None: ...

    async def describe(self) -> Any:
        return SimpleNamespace(gauges={"generation_paused": 0.0}, generation="running")

    async def list_adapters(self, principal: Any, page_size: int, token: str) -> Any:
        assert page_size >= 1
        token.encode()
        return SimpleNamespace(records=[], next_token="")

    async def resolve(self, principal: Any, ref: str, *_more: Any, **_fields: Any) -> Any:
        ref.encode()
        raise self._full()

    @staticmethod
    def _full() -> QueueFull:
        return QueueFull("the queue is full", subject="max_queue", retry_after_s=1.0)


@cache
def _app() -> RequestMiddleware:
    service: Any = _Service()
    metrics: Any = SimpleNamespace(
        gateway_exposition=lambda: (b"", "text/plain"), exposition=lambda: (b"", "text/plain")
    )
    return make_app(
        service,
        metrics,
        lambda end: None,
        lambda: "",
        Shares("answers", 1 << 20),
        is_serving=lambda: True,
    )


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
