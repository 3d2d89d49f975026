"""Requests over HTTP are counted and logged as those over gRPC: one account per answer."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from tests.inference_svc.http.conftest import Front
from tests.inference_svc.serving import digest_of, until


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.name == "inference_svc.requests"]
    return [vars(record) for record in found]


def test_every_choice_has_an_account(serve_http, caplog: pytest.LogCaptureFixture) -> None:
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


def test_what_is_refused_is_counted_by_reason(serve_http, caplog: pytest.LogCaptureFixture) -> None:
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


def test_who_leaves_has_cancelled(serve_http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(front: Front) -> None:
        front.engine.turn_s = 0.01
        ours = {"ignore_eos": True}
        stream = await front.complete(stream=True, n=2, max_tokens=60, extra_body=ours)
        await anext(stream)
        await stream.close()
        await until(lambda: len(lines(caplog)) == 2)
        assert [line["status"] for line in lines(caplog)] == ["CANCELLED"] * 2
        text = (await front.raw.get("/metrics")).text
        assert 'loadout_inference_requests_total{finish_reason="cancelled"} 2.0' in text

    serve_http(body)
