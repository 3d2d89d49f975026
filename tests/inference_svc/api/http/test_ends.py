"""How requests end, as it is counted, kept and traced."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from loadout.inference.v1 import inference_pb2 as pb
from tests.adapter_store.service.guarded import token_lines, token_of, write_policy
from tests.inference_svc.api.http.conftest import Front, traced
from tests.support.otlp import Receiver
from tests.support.wait import until_async

PREFIX = "loadout_inference_"
CHAT = "/v1/chat/completions"


async def errors_told(front: Front) -> list[dict[str, Any]]:
    """Those that GetDebugInfo has."""
    async for part in front.running.stub.GetDebugInfo(pb.GetDebugInfoRequest()):
        if part.name == "errors.json":
            return list(json.loads(part.content)["errors"])
    raise AssertionError("no errors.json")


def test_a_stream_that_breaks_says_why(serve_http, receiver: Receiver) -> None:
    """To its caller, and to those who look for what is wrong: it has not gone well."""

    async def body(front: Front) -> None:
        front.engine.turn_s = 0.02
        stream = await front.complete(max_tokens=40, stream=True, extra_body={"ignore_eos": True})
        await anext(stream)
        front.engine.fail.set()
        with pytest.raises(openai.APIError, match="internal error") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "internal_error"
        text = (await asyncio.to_thread(front.running.scrape)).splitlines()
        lines = [line for line in text if line.startswith(f"{PREFIX}http_requests_total{{")]
        counted = [line for line in lines if not line.endswith(" 0.0")]
        assert counted == [
            f'{PREFIX}http_requests_total{{route="/v1/completions",status="500"}} 1.0'
        ]
        rejected = '{method="/v1/completions",reason="ENGINE_FAILED"}'
        assert f"{PREFIX}rejections_total{rejected} 1.0" in text
        (error,) = await errors_told(front)
        assert (error["method"], error["code"]) == ("/v1/completions", "500")
        assert (error["reason"], error["message"]) == ("ENGINE_FAILED", "the engine failed")

    serve_http(body, **traced(receiver))
    (span,) = [span for span in receiver.spans if span.name == "server POST /v1/completions"]
    assert span.error == "ENGINE_FAILED"
    assert span.attributes["loadout.reason"] == "ENGINE_FAILED"
    assert span.attributes["http.response.status_code"] == 200, "that is how it began"


def test_a_stream_that_is_left_has_not_gone_well_either(serve_http, receiver: Receiver) -> None:
    async def body(front: Front) -> None:
        front.engine.turn_s = 0.01
        stream = await front.complete(max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        await anext(stream)
        await stream.close()
        await until_async(lambda: front.engine.num_running == 0)
        text = await asyncio.to_thread(front.running.scrape)
        assert f'{PREFIX}http_requests_total{{route="/v1/completions",status="499"}} 1.0' in text
        assert await errors_told(front) == []

    serve_http(body, **traced(receiver))
    (span,) = [span for span in receiver.spans if span.name == "server POST /v1/completions"]
    assert (span.error, span.attributes["loadout.cancelled"]) == ("", True)


def test_strangers_leave_no_trace(serve_http, receiver: Receiver, tmp_path: Path) -> None:
    """Whatever they do wrong before they are asked who they are."""
    policy = write_policy(tmp_path, token_lines("caller", ["caller"]))
    known = {"authorization": f"Bearer {token_of('caller')}"}

    async def body(front: Front) -> None:
        bad_id = {"x-request-id": "a b"}
        for method, path, headers, status in (
            ("GET", CHAT, {}, 405),
            ("M" * 60_000, CHAT, {}, 405),
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
