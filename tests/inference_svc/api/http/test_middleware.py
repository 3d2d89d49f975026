"""How requests end, as metrics, debug info and traces show it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from loadout.inference.v1 import inference_pb2 as pb
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.inference.front import Front
from tests.support.servers.otlp import Receiver, traced
from tests.support.wait import until_async

PREFIX = "loadout_inference_"
CHAT = "/v1/chat/completions"


async def shown_errors(front: Front) -> list[dict[str, Any]]:
    """Returns those of GetDebugInfo."""
    async for part in front.running.stub.GetDebugInfo(pb.GetDebugInfoRequest()):
        if part.name == "errors.json":
            return list(json.loads(part.content)["errors"])
    raise AssertionError("no errors.json")


def test_stream_that_fails_has_the_reason(serve_http, receiver: Receiver) -> None:
    async def body(front: Front) -> None:
        front.engine.step_s = 0.02
        stream = await front.complete(max_tokens=40, stream=True, extra_body={"ignore_eos": True})
        await anext(stream)
        front.engine.fail.set()
        with pytest.raises(openai.APIError, match="the engine failed") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_failed"
        await front.until_metric('http_requests_total{route="/v1/completions",status="503"} 1.0')
        text = (await asyncio.to_thread(front.running.scrape)).splitlines()
        lines = [line for line in text if line.startswith(f"{PREFIX}http_requests_total{{")]
        counted = [line for line in lines if not line.endswith(" 0.0")]
        assert counted == [
            f'{PREFIX}http_requests_total{{route="/v1/completions",status="503"}} 1.0'
        ]
        rejected = '{method="/v1/completions",reason="ENGINE_FAILED"}'
        assert f"{PREFIX}rejections_total{rejected} 1.0" in text
        (error,) = await shown_errors(front)
        assert (error["method"], error["code"]) == ("/v1/completions", "503")
        assert (error["reason"], error["message"]) == ("ENGINE_FAILED", "the engine failed")

    serve_http(body, **traced(receiver))
    (span,) = [span for span in receiver.spans if span.name == "server POST /v1/completions"]
    assert span.error == "ENGINE_FAILED"
    assert span.attributes["loadout.reason"] == "ENGINE_FAILED"
    assert span.attributes["http.response.status_code"] == 200, "the status of its begin"


def test_abandoned_stream_is_cancelled(serve_http, receiver: Receiver) -> None:
    async def body(front: Front) -> None:
        front.engine.step_s = 0.01
        stream = await front.complete(max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        await anext(stream)
        await stream.close()
        await until_async(lambda: front.engine.num_running == 0)
        await front.until_metric('http_requests_total{route="/v1/completions",status="499"} 1.0')
        assert await shown_errors(front) == []

    serve_http(body, **traced(receiver))
    (span,) = [span for span in receiver.spans if span.name == "server POST /v1/completions"]
    assert (span.error, span.attributes["loadout.cancelled"]) == ("", True)


def test_unauthenticated_requests_are_not_traced(
    serve_http, receiver: Receiver, tmp_path: Path
) -> None:
    policy = write_policy(tmp_path, token_lines("caller", ["caller"]))
    known = {"authorization": f"Bearer {token_of('caller')}"}

    async def body(front: Front) -> None:
        bad_id = {"x-request-id": "a b"}
        for method, path, headers, status in (
            ("GET", CHAT, {}, 405),
            ("M" * 30_000, CHAT, {}, 405),
            ("POST", CHAT, bad_id, 401),
            ("GET", "/v1/models", {}, 401),
            ("POST", "/v1/load_lora_adapter", {}, 401),
            ("POST", "/v1/unload_lora_adapter", known, 403),
            ("POST", CHAT, known | bad_id, 400),
        ):
            headers = {"content-type": "application/json", **headers}
            body = b'{"lora_name": "x"}' if method == "POST" else None
            answer = await front.raw.request(method, path, headers=headers, content=body)
            assert answer.status_code == status, (method[:9], path)

    serve_http(body, policy_file=policy, **traced(receiver))
    assert {span.name for span in receiver.spans} == {
        "server POST /v1/unload_lora_adapter",
        f"server POST {CHAT}",
    }
    assert [span.attributes["http.response.status_code"] for span in receiver.spans] == [403, 400]
