"""Requests over HTTP are counted and logged like those over gRPC: one record per choice."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from inference_svc.api.http import response
from inference_svc.engine.transport.messages import Cancel
from inference_svc.errors import QueueFull
from tests.support.inference.front import Front
from tests.support.inference.serving import digest_of
from tests.support.servers.otlp import Receiver, traced
from tests.support.wait import until_async


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.name == "inference_svc.requests"]
    return [vars(record) for record in found]


def test_every_choice_has_a_record(serve_http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        await front.complete(model="upper", n=2, extra_headers={"x-request-id": "mine"})
        first, second = lines(caplog)
        assert {first["request_id"], second["request_id"]} == {"mine-0", "mine-1"}
        for line in (first, second):
            assert (line["status"], line["finish_reason"]) == ("OK", "stop")
            assert (line["adapter"], line["digest"]) == ("default/upper@1", digest_of("upper"))
            assert (line["completion_tokens"], line["prompt_tokens"]) == (4, 3)
        async for _ in await front.complete(stream=True):
            pass
        assert (lines(caplog)[2]["status"], lines(caplog)[2]["completion_tokens"]) == ("OK", 4)
        text = (await front.raw.get("/metrics")).text
        assert 'loadout_inference_requests_total{finish_reason="stop"} 3.0' in text
        assert "loadout_inference_generated_tokens_total 12.0" in text

    serve_http(body, store=True)


def test_refused_requests_are_counted_by_reason(
    serve_http, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        with pytest.raises(openai.NotFoundError):
            await front.chat(model="gone")
        (line,) = lines(caplog)
        assert (line["status"], line["reason"]) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert line["adapter"] == "gone"
        text = (await front.raw.get("/metrics")).text
        route = '{method="/v1/chat/completions",reason="ADAPTER_NOT_FOUND"}'
        assert f"loadout_inference_rejections_total{route} 1.0" in text
        assert 'loadout_inference_requests_total{finish_reason="error"} 0.0' in text

    serve_http(body, store=True)


def test_invalid_requests_have_a_record(serve_http, caplog: pytest.LogCaptureFixture) -> None:
    """With the adapter, once the body could be read."""
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        for invalid in ({"model": 5}, {"model": "upper", "prompt": "a", "top_p": 2.0}):
            assert (await front.post("/v1/completions", invalid)).status_code == 400
        found = [(line["status"], line["reason"], line["adapter"]) for line in lines(caplog)]
        assert found == [
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", ""),
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "upper"),
        ]

    serve_http(body, store=True)


def test_records_have_their_own_prompt(serve_http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        await front.complete(["abc", "cab"], n=2)
        found = {line["request_id"].rpartition("-")[2]: line["prompt"] for line in lines(caplog)}
        assert found == {"0": "abc", "1": "abc", "2": "cab", "3": "cab"}

    serve_http(body, log_prompts=True)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_bug_while_an_answer_is_encoded_is_an_error(
    serve_http, caplog: pytest.LogCaptureFixture, monkeypatch, num_choices: int
) -> None:
    """The caller has not left, so nothing is counted as cancelled."""
    caplog.set_level(logging.INFO)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(response.Choice, "add", fail)

    async def body(front: Front) -> None:
        front.engine.step_s = 0.05  # else a late reader gets all at once of what has ended well
        with pytest.raises(openai.InternalServerError):
            await front.complete(n=num_choices)
        await until_async(lambda: len(lines(caplog)) == num_choices)
        assert {line["status"] for line in lines(caplog)} == {"INTERNAL"}
        text = (await front.raw.get("/metrics")).text
        assert 'loadout_inference_requests_total{finish_reason="cancelled"} 0.0' in text

    serve_http(body)


class FullAfter(dict[str, Exception]):
    """Errors of an engine, except for the first three requests."""

    num_taken = 0

    def __contains__(self, key: object) -> bool:
        self.num_taken += 1
        return self.num_taken > 3


@pytest.mark.parametrize("stream", [False, True])
def test_error_of_one_choice_ends_all(
    serve_http, caplog: pytest.LogCaptureFixture, receiver: Receiver, stream: bool
) -> None:
    """None of them is counted as cancelled."""
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        full = QueueFull("too many wait", retry_after_s=1.0)
        front.engine.errors = FullAfter({digest_of("upper"): full})
        front.engine.hold.set()
        with pytest.raises(openai.RateLimitError):
            await front.complete(model="upper", n=4, stream=stream)
        await until_async(lambda: len(lines(caplog)) == 4 and front.engine.num_running == 0)
        for line in lines(caplog):
            assert (line["status"], line["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        text = (await front.raw.get("/metrics")).text
        assert 'loadout_inference_requests_total{finish_reason="error"} 4.0' in text
        assert 'loadout_inference_requests_total{finish_reason="cancelled"} 0.0' in text

    serve_http(body, store=True, **traced(receiver))
    spans = [span for span in receiver.spans if span.name.startswith(("text_", "server "))]
    assert len(spans) == 5
    assert not [span for span in spans if "loadout.cancelled" in span.attributes]
    assert {span.error for span in spans if span.name.startswith("text_")} == {"QUEUE_FULL"}


def test_disconnect_cancels_every_choice(serve_http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        front.engine.step_s = 0.01
        ours = {"ignore_eos": True}
        stream = await front.complete(stream=True, n=2, max_tokens=60, extra_body=ours)
        await anext(stream)
        await stream.close()
        await until_async(lambda: len(lines(caplog)) == 2)
        assert [line["status"] for line in lines(caplog)] == ["CANCELLED"] * 2
        text = (await front.raw.get("/metrics")).text
        assert 'loadout_inference_requests_total{finish_reason="cancelled"} 2.0' in text

    serve_http(body)


def events_of(text: str) -> list[Any]:
    """The events of a stream, and "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the fox"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the fox"}]},
    "/inference/v1/generate": {"token_ids": [5, 6, 7]},
}


@pytest.mark.parametrize("ends", ["stop", "length", "abort"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_chunk_has_a_finish_reason_and_one_of_each_choice_has_a_value(
    serve_http, route: str, ends: str
) -> None:
    """maximhq/bifrost#7397, vllm#19662: null until the choice's last chunk, also where the engine
    aborts it."""
    sampling: dict[str, Any] = {"n": 3, "max_tokens": 2 if ends == "length" else 40}
    request = {"model": "base", "stream": True, **ROUTES[route]}
    request |= {"sampling_params": sampling} if "generate" in route else sampling

    async def abort(front: Front) -> None:
        await until_async(lambda: front.engine.num_running == 3)
        for request_id in list(front.engine._running):
            front.engine.send(Cancel(request_id))

    async def body(front: Front) -> None:
        if ends == "abort":
            front.engine.hold.set()
            aborting = asyncio.create_task(abort(front))
        *events, done = events_of((await front.post(route, request)).text)
        assert done == "[DONE]"
        choices = [choice for event in events for choice in event["choices"]]
        assert len(choices) >= 3
        for index in range(3):
            reasons = [each["finish_reason"] for each in choices if each["index"] == index]
            assert reasons == [*[None] * (len(reasons) - 1), ends]
        if ends == "abort":
            await aborting

    serve_http(body)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_whose_engine_fails_ends_with_an_error(serve_http, route: str) -> None:
    """BerriAI/litellm#30245: the error is the last event, and [DONE] does not follow."""
    sampling = {"max_tokens": 40, "ignore_eos": True}
    request = {"model": "base", "stream": True, **ROUTES[route]}
    request |= {"sampling_params": sampling} if "generate" in route else sampling

    async def body(front: Front) -> None:
        front.engine.step_s = 0.01
        async with front.raw.stream("POST", route, json=request) as answer:
            assert answer.status_code == 200
            parts = answer.aiter_text()
            text = await anext(parts)
            front.engine.fail.set()
            async for part in parts:
                text += part
        *events, last = events_of(text)
        assert events
        assert all("choices" in event for event in events)
        assert (last["error"]["code"], last["error"]["type"]) == ("engine_failed", "server_error")

    serve_http(body)
