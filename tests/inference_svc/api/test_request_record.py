"""Every request is counted once and logged as one line."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_svc.api.grpc import convert
from inference_svc.errors import AdapterUnavailable
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from tests.support.inference.serving import Running, digest_of, error_of
from tests.support.logs import captured_log
from tests.support.wait import until_async

PROMPT = "abc"
TOKEN = "s3cr3t-of-the-gateway"
PREFIX = "loadout_inference_"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with captured_log() as written:
        yield written


def request_lines(log: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "inference_svc.requests"]


async def scraped(running: Running) -> str:
    return await asyncio.to_thread(running.scrape)


def test_finished_request(serve: Any, log: io.StringIO) -> None:
    async def body(running: Running) -> None:
        await running.generate(PROMPT, request_id="r-1", adapter="upper")
        await until_async(lambda: bool(request_lines(log)))
        text = await scraped(running)
        assert f'{PREFIX}requests_total{{finish_reason="stop"}} 1.0' in text
        assert f'{PREFIX}adapter_requests_total{{adapter="default/upper"}} 1.0' in text
        assert f"{PREFIX}request_seconds_count 1.0" in text

    serve(body, store=True)
    [line] = request_lines(log)
    del line["time"]
    assert line.pop("total_s") >= 0
    assert line == {
        "level": "INFO",
        "logger": "inference_svc.requests",
        "message": "request finished",
        "request_id": "r-1",
        "who": "",
        "tenant": "default",
        "adapter": "default/upper@1",
        "digest": digest_of("upper"),
        "status": "OK",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "cached_prompt_tokens": 2,
        "completion_tokens": 4,
        "queued_s": 0.25,
        "adapter_wait_s": 0.125,
        "first_token_s": 0.5,
    }


def test_refused_and_failed_requests(serve: Any, engine: Any, log: io.StringIO) -> None:
    engine.errors[digest_of("slow")] = AdapterUnavailable("not resident after 10 s")

    async def body(running: Running) -> None:
        for fields in ({"adapter": "gone"}, {"adapter": "slow"}, {"adapter": "No Name\n"}):
            await error_of(running.generate(PROMPT, **fields))
        await until_async(lambda: len(request_lines(log)) == 3)
        text = await scraped(running)
        for reason in ("ADAPTER_NOT_FOUND", "ADAPTER_UNAVAILABLE", "INVALID_ARGUMENT"):
            labels = f'{{method="Generate",reason="{reason}"}}'
            assert f"{PREFIX}rejections_total{labels} 1.0" in text
        assert f'{PREFIX}requests_total{{finish_reason="error"}} 1.0' in text
        assert f'{PREFIX}adapter_errors_total{{adapter="default/slow"}} 1.0' in text
        assert f"{PREFIX}adapter_wait_seconds_count 1.0" in text, "it has waited until the timeout"

    serve(body, store=True)
    found = [(line["status"], line["reason"], line["adapter"]) for line in request_lines(log)]
    assert found == [
        ("NOT_FOUND", "ADAPTER_NOT_FOUND", "gone"),
        ("UNAVAILABLE", "ADAPTER_UNAVAILABLE", "default/slow@1"),
        ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "No Name\n"),
    ]


def test_cancelled_request(serve: Any, log: io.StringIO) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        call = running.stub.Generate(pb.GenerateRequest(text=PROMPT, request_id="left"))
        await until_async(lambda: running.engine.num_running == 1)
        call.cancel()
        await until_async(lambda: bool(request_lines(log)))
        text = await scraped(running)
        assert f'{PREFIX}requests_total{{finish_reason="cancelled"}} 1.0' in text
        assert f'{PREFIX}adapter_requests_total{{adapter="base"}} 1.0' in text

    serve(body)
    [line] = request_lines(log)
    assert (line["request_id"], line["status"], line["adapter"]) == ("left", "CANCELLED", "")
    assert "reason" not in line


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("finish", "OK", "stop"),
        ("abort", "CANCELLED", "cancelled"),
        ("error", "UNAVAILABLE", "error"),
        ("lost", "CANCELLED", "cancelled"),
    ],
)
def test_every_end_is_one_line_and_one_count(
    serve: Any, engine: Any, log: io.StringIO, end: str, status: str, reason: str
) -> None:
    """syv-ai/qwen38-27b-rtx3090#94: a request that finishes, whose deadline passes, that fails, and
    whose caller's connection is gone."""
    if end == "error":
        engine.errors[digest_of("upper")] = AdapterUnavailable("not resident after 10 s")

    async def body(running: Running) -> None:
        if end in ("abort", "lost"):
            running.engine.hold.set()
        if end == "lost":
            async with grpc.aio.insecure_channel(running.server.address) as channel:
                stub = pb_grpc.InferenceServiceStub(channel)
                call = stub.Generate(pb.GenerateRequest(text=PROMPT, adapter="upper"))
                await until_async(lambda: running.engine.num_running == 1)
                del call
        elif end == "finish":
            await running.generate(PROMPT, adapter="upper")
        else:
            timeout = 1.0 if end == "abort" else None
            await error_of(running.generate(PROMPT, timeout, adapter="upper"))
        await until_async(lambda: bool(request_lines(log)) and not running.engine.num_running)
        ends = re.findall(rf"{PREFIX}requests_total{{(.*)}} 1.0", await scraped(running))
        assert ends == [f'finish_reason="{reason}"']

    serve(body, store=True)
    assert [line["status"] for line in request_lines(log)] == [status]


def test_bug_while_an_answer_is_written_is_an_error(
    serve: Any, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has not left, so nothing is counted as cancelled."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(convert.Answer, "responses", fail)

    async def body(running: Running) -> None:
        assert (await error_of(running.generate(PROMPT))).code() is grpc.StatusCode.INTERNAL
        await until_async(lambda: bool(request_lines(log)) and running.engine.num_running == 0)
        # It has finished, if a late reader got all of it at once.
        assert f'{PREFIX}requests_total{{finish_reason="cancelled"}} 0.0' in await scraped(running)

    serve(body)
    [line] = request_lines(log)
    assert line["status"] == "INTERNAL"


def test_bug_is_an_error(serve: Any, engine: Any, log: io.StringIO) -> None:
    engine.errors[""] = ZeroDivisionError("a bug")

    async def body(running: Running) -> None:
        assert (await error_of(running.generate(PROMPT))).code() is grpc.StatusCode.INTERNAL
        text = await scraped(running)
        labels = '{method="Generate",reason="INTERNAL"}'
        assert f"{PREFIX}rejections_total{labels} 1.0" in text
        assert f'{PREFIX}requests_total{{finish_reason="error"}} 1.0' in text

    serve(body)
    [line] = request_lines(log)
    assert line["status"] == "INTERNAL"


def test_neither_tokens_nor_prompts_are_logged(
    serve: Any, log: io.StringIO, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[tokens.gateway]\nsha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\n'
        'roles = ["caller"]\ntenants = ["team-a"]\n'
    )
    prompt = "CAB CAB A"

    async def body(running: Running) -> None:
        for token in (TOKEN, "another-" + TOKEN):
            metadata = (("authorization", f"Bearer {token}"),)
            call = running.stub.Generate(pb.GenerateRequest(text=prompt), metadata=metadata)
            if token == TOKEN:
                assert [response async for response in call]
            else:
                assert (await error_of(call.read())).code() is grpc.StatusCode.UNAUTHENTICATED

    serve(body, policy_file=policy)
    [line] = request_lines(log)
    assert (line["who"], line["tenant"]) == ("gateway", "team-a")
    assert TOKEN not in log.getvalue()
    assert prompt not in log.getvalue()
    assert '"call refused"' in log.getvalue()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"text": "abc"}, "abc"),
        ({"token_ids": pb.TokenIds(ids=[4, 5])}, "4\n5"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="abc")])},
            "user: abc",
        ),
    ],
)
def test_prompts_are_logged_with_the_setting(
    serve: Any, log: io.StringIO, fields: dict[str, Any], shown: str
) -> None:
    async def body(running: Running) -> None:
        request = pb.GenerateRequest(**fields)
        assert [response async for response in running.stub.Generate(request)]

    serve(body, log_prompts=True)
    [line] = request_lines(log)
    assert line["prompt"] == shown
    assert "--log-prompts is on" in log.getvalue(), "a warning at start"


def test_quiet_log_has_no_line(serve: Any, log: io.StringIO) -> None:
    async def body(running: Running) -> None:
        logging.getLogger().setLevel(logging.WARNING)
        await running.generate(PROMPT)
        assert f'{PREFIX}requests_total{{finish_reason="stop"}} 1.0' in await scraped(running)

    serve(body)
    assert not request_lines(log)
