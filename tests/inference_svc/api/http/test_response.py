"""Responses with many logprobs: bounded, and formatted without blocking other requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from inference_svc.api.http import response, results
from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.api.http.completions import CompletionFormatter
from inference_svc.api.http.response import PART_BYTES, FullResponse
from inference_svc.api.http.results import SLICE_TOKENS, ExpertsForm
from inference_svc.core import AdapterVersion, FinishReason
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.results.routed_experts import RoutedExperts
from inference_svc.results.scores import Scores
from tests.support.inference.front import Front
from tests.support.wait import until_async

NUM_TOKENS, TOP = 40, 20
NO_PIECES: Any = None


def read(front: Front, fields: dict[str, Any]) -> tuple[str, bytes]:
    """Returns a response's length and body, read outside the server's event loop."""
    host, port = front.running.server.http_address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(fields), headers)
    with connection.getresponse() as response:
        found = response.getheader("content-length") or "", response.read()
    connection.close()
    return found


class Turns:
    """Counts, per turn of the event loop, what one response formats and sends in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        format_logprobs, respond = ChatFormatter.logprobs, FullResponse.__call__

        def logprobs(formatter: ChatFormatter, tokens: Sequence[TokenLogprobs]) -> Any:
            self._count("tokens", len(tokens))
            return format_logprobs(formatter, tokens)

        async def call(response: FullResponse, scope: Any, receive: Any, send: Any) -> None:
            async def counted(message: Any) -> None:
                self._count("bytes", len(message.get("body", b"")))
                await send(message)

            await respond(response, scope, receive, counted)

        monkeypatch.setattr(ChatFormatter, "logprobs", logprobs)
        monkeypatch.setattr(FullResponse, "__call__", call)

    def _count(self, name: str, amount: int) -> None:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._now.clear)
        self._now[name] += amount
        self.most[name] = max(self.most[name], self._now[name])


@pytest.mark.parametrize("num_choices", [24, pytest.param(96, marks=pytest.mark.long)])
def test_large_response_does_not_block_the_event_loop(
    serve_http, monkeypatch: pytest.MonkeyPatch, num_choices: int
) -> None:
    """24 choices have 20,160 logprobs: formatted at once, they take an eighth of a second."""
    fields = {
        "model": "base",
        "messages": [{"role": "user", "content": "hi"}],
        "n": num_choices,
        "max_tokens": NUM_TOKENS,
        "logprobs": True,
        "top_logprobs": TOP,
        "ignore_eos": True,
    }

    turns = Turns(monkeypatch)

    async def body(front: Front) -> None:
        length, data = await asyncio.to_thread(read, front, fields)
        assert len(data) == int(length)
        choices = json.loads(data)["choices"]
        assert [choice["index"] for choice in choices] == list(range(num_choices))
        for choice in choices:
            assert len(choice["logprobs"]["content"]) == NUM_TOKENS
            assert {len(each["top_logprobs"]) for each in choice["logprobs"]["content"]} == {TOP}
        assert 0 < turns.most["tokens"] <= SLICE_TOKENS
        assert 0 < turns.most["bytes"] <= 2 * PART_BYTES

    serve_http(body)


def test_backlog_of_a_slow_reader_is_sent_in_slices(serve_http, monkeypatch: Any) -> None:
    monkeypatch.setattr("inference_svc.api.http.results.SLICE_TOKENS", 4)

    async def body(front: Front) -> None:
        # All its tokens arrive at once, as if they had not been read.
        front.engine.hold.set()
        for send in (front.complete, front.chat):
            front.engine.step_s = 0.0
            fields: dict[str, Any] = {"max_tokens": 30, "stream": True}
            fields |= {"logprobs": 1} if send == front.complete else {"logprobs": True}
            fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
            sending = asyncio.create_task(send("abcabc", **fields))
            await until_async(lambda: front.engine.num_running)
            front.engine.hold.clear()
            # Blocks the event loop, so that nothing is read meanwhile.
            while front.engine.num_running:
                time.sleep(0.001)
            chunks = [chunk.choices[0] async for chunk in await sending]
            front.engine.hold.set()
            sizes = [len(chunk.token_ids) for chunk in chunks]
            assert (sum(sizes), max(sizes)) == (30, 4)
            logprobs = [chunk.logprobs for chunk in chunks]
            num_tokens = [
                len(each.content if send == front.chat else each.tokens) for each in logprobs
            ]
            assert num_tokens == sizes
            assert chunks[-1].finish_reason == "length"

    serve_http(body)


def test_logprobs_of_a_response_are_bounded(serve_http, monkeypatch: Any) -> None:
    monkeypatch.setattr("inference_svc.api.http.generation_body.MAX_RESPONSE_LOGPROBS", 1000)
    ours = {"ignore_eos": True}

    async def body(front: Front) -> None:
        for limit in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError, match="exceed the 1000") as caught:
                await front.chat(n=4, logprobs=True, top_logprobs=9, **{limit: 26})
            assert caught.value.param == limit
        with pytest.raises(openai.BadRequestError) as caught:
            await front.complete(["a", "b"], n=10, max_tokens=51, logprobs=0, stream=True)
        assert caught.value.param == "max_tokens"
        assert not front.engine.submitted
        # Only tokens that fit in the context count.
        assert await front.chat(logprobs=True, top_logprobs=9, max_tokens=10**6)
        assert await front.complete(["a", "b"], n=10, max_tokens=50, logprobs=0)
        assert await front.complete(["a", "b"], n=10, max_tokens=51)
        # Without max_tokens the response ends at the bound.
        answer = await front.chat(n=4, logprobs=True, top_logprobs=9, extra_body=ours)
        assert answer.usage.completion_tokens == 4 * 25
        assert {choice.finish_reason for choice in answer.choices} == {"length"}

    serve_http(body)


@pytest.mark.parametrize("bytes_per_id", [1, 2])
def test_experts_are_one_text_and_many_events(monkeypatch: Any, bytes_per_id: int) -> None:
    """However their bytes fall into thirds, and whatever pieces they come in."""
    monkeypatch.setattr(results, "SLICE_ROUTED_BYTES", 100)
    token_bytes = 5 * 1 * bytes_per_id

    def piece(first: int, num_tokens: int) -> RoutedExperts:
        whole = bytes(index * 7 % 256 for index in range(token_bytes * 60))
        data = whole[first * token_bytes : (first + num_tokens) * token_bytes]
        return RoutedExperts(first, 5, 1, bytes_per_id, data)

    deltas = [
        Delta([1], "a", parts=[piece(0, 41)]),
        Delta([2], "b", parts=[piece(41, 1), piece(42, 7)]),
        Delta([3], "c", finish_reason=FinishReason.STOP, parts=[piece(49, 11)]),
    ]
    choice = response.Choice(CompletionFormatter(0, NO_PIECES, includes_ids=True))
    slices = [each for delta in deltas for each in results.slices(delta)]
    for each in slices:
        choice.add(each)
        assert sum(len(part.experts) for part in of_kind(each.parts, RoutedExperts)) <= 100
    found = json.loads(choice.to_json())
    assert found["text"] == "abc"
    routed = found["routed_experts"]
    assert b64decode(routed["data"]) == piece(0, 60).experts
    assert (routed["first_position"], routed["shape"]) == (0, [60, 5, 1])
    assert routed["dtype"] == f"uint{8 * bytes_per_id}"
    parts = [part for each in slices for part in of_kind(each.parts, RoutedExperts)]
    events = [ExpertsForm.event([part])["routed_experts"] for part in parts]
    assert b"".join(b64decode(each["data"]) for each in events) == piece(0, 60).experts
    assert [len(each.parts) for each in slices].count(1) == len(events) > 3


def test_echoed_prompt_becomes_objects_slice_by_slice(monkeypatch: Any) -> None:
    """And each slice has logprobs to show: none is an empty event."""
    num_tokens, num_top, num_made = 100, 20, 0
    make = TokenLogprobs.of

    def counted(*args: Any) -> TokenLogprobs:
        nonlocal num_made
        num_made += 1
        return make(*args)

    monkeypatch.setattr(TokenLogprobs, "of", counted)
    values = np.linspace(-9, -1, num_tokens * num_top, dtype=np.float32).reshape(-1, num_top)
    ids = np.arange(num_tokens * num_top, dtype=np.int32).reshape(-1, num_top)
    prompt = np.arange(1, num_tokens + 1, dtype=np.int32)
    scores = Scores(0, prompt, values[:, 1].copy(), prompt, ids, values)
    generated = make(7, -0.5, ids[0], values[0])
    version = AdapterVersion("a@2", "sha256:f")
    deltas = [
        Delta(text="abc", echoed_ids=(0, *prompt.tolist())),
        Delta([7], "d", [generated, scores], FinishReason.LENGTH, version=version),
    ]
    choice = response.Choice(CompletionFormatter(0, NO_PIECES, includes_ids=True))
    found: list[TokenLogprobs] = []
    for delta in deltas:
        for each in results.slices(delta, num_top - 1):
            tokens = of_kind(each.parts, TokenLogprobs)
            assert tokens
            assert num_made - len(found) <= SLICE_TOKENS
            found += tokens
            choice.add(replace(each, parts=[]))
    assert [each.token_id for each in found] == [0, *prompt.tolist(), 7]
    assert math.isnan(found[0].logprob)
    for row, each in enumerate(found[1:-1]):
        top = zip(ids[row, :-1].tolist(), values[row, :-1].tolist(), strict=True)
        assert each.top == list(top)
        assert each.logprob == values[row, 1]
    assert (choice.text, choice.token_ids) == ("abcd", [7])
    [counted] = json.loads(choice.to_json())["adapter_versions"]  # the prompt's tokens do not count
    assert (counted["version"]["name"], counted["num_tokens"]) == ("a@2", 1)
