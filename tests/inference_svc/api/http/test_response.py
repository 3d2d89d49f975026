"""Answers with many logprobs: bounded, and written without holding up anybody else."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from typing import Any

import openai
import pytest

from tests.inference_svc.api.http.conftest import Front

NUM_CHOICES, NUM_TOKENS, TOP = 96, 40, 20


def read(front: Front, fields: dict[str, Any]) -> tuple[str, bytes]:
    """Of an answer its length and its bytes, without a look at them on the server's loop."""
    host, port = front.running.server.http_address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(fields), headers)
    with connection.getresponse() as response:
        found = response.getheader("content-length") or "", response.read()
    connection.close()
    return found


async def longest_gap_s(until: asyncio.Task[Any]) -> float:
    """For how long nothing else was done on this loop."""
    longest_s = 0.0
    while not until.done():
        began_s = time.monotonic()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s


def test_others_go_on_while_a_large_answer_is_written(serve_http) -> None:
    """80,640 logprobs: written at one go, they take half a second."""
    fields = {
        "model": "base",
        "messages": [{"role": "user", "content": "hi"}],
        "n": NUM_CHOICES,
        "max_tokens": NUM_TOKENS,
        "logprobs": True,
        "top_logprobs": TOP,
        "ignore_eos": True,
    }

    async def body(front: Front) -> None:
        front.engine.turn_s = 0.01
        answering = asyncio.create_task(asyncio.to_thread(read, front, fields))
        gap_s = await longest_gap_s(answering)
        length, data = await answering
        assert len(data) == int(length)
        choices = json.loads(data)["choices"]
        assert [choice["index"] for choice in choices] == list(range(NUM_CHOICES))
        for choice in choices:
            assert len(choice["logprobs"]["content"]) == NUM_TOKENS
            assert {len(each["top_logprobs"]) for each in choice["logprobs"]["content"]} == {TOP}
        assert gap_s < 0.2

    serve_http(body)


def test_what_a_slow_reader_has_left_is_told_in_slices(serve_http, monkeypatch: Any) -> None:
    monkeypatch.setattr("inference_svc.api.http.choices.SLICE_TOKENS", 4)

    async def body(front: Front) -> None:
        # All its tokens arrive at once, as if nobody had read them.
        front.engine.hold.set()
        for kind in (front.complete, front.chat):
            front.engine.turn_s = 0.0
            fields: dict[str, Any] = {"max_tokens": 30, "stream": True}
            fields |= {"logprobs": 1} if kind == front.complete else {"logprobs": True}
            fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
            asking = asyncio.create_task(kind("abcabc", **fields))
            while not front.engine.num_running:
                await asyncio.sleep(0.001)
            front.engine.hold.clear()
            # Nothing is read meanwhile.
            time.sleep(0.1)
            chunks = [chunk.choices[0] async for chunk in await asking]
            front.engine.hold.set()
            sizes = [len(chunk.token_ids) for chunk in chunks]
            assert (sum(sizes), max(sizes)) == (30, 4)
            tells = [chunk.logprobs for chunk in chunks]
            told = [len(each.content if kind == front.chat else each.tokens) for each in tells]
            assert told == sizes
            assert chunks[-1].finish_reason == "length"

    serve_http(body)


def test_more_logprobs_than_an_answer_has_are_refused(serve_http, monkeypatch: Any) -> None:
    monkeypatch.setattr("inference_svc.api.http.request.MAX_RESPONSE_LOGPROBS", 1000)
    ours = {"ignore_eos": True}

    async def body(front: Front) -> None:
        for limit in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError, match="are more than the 1000") as caught:
                await front.chat(n=4, logprobs=True, top_logprobs=9, **{limit: 26})
            assert caught.value.param == limit
        with pytest.raises(openai.BadRequestError) as caught:
            await front.complete(["a", "b"], n=10, max_tokens=51, logprobs=0, stream=True)
        assert caught.value.param == "max_tokens"
        assert not front.engine.submitted
        # What can really come counts: the context has no room for more.
        assert await front.chat(logprobs=True, top_logprobs=9, max_tokens=10**6)
        assert await front.complete(["a", "b"], n=10, max_tokens=50, logprobs=0)
        assert await front.complete(["a", "b"], n=10, max_tokens=51)
        # Without a limit an answer ends where the bound does.
        answer = await front.chat(n=4, logprobs=True, top_logprobs=9, extra_body=ours)
        assert answer.usage.completion_tokens == 4 * 25
        assert {choice.finish_reason for choice in answer.choices} == {"length"}

    serve_http(body)
