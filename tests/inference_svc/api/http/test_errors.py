"""Errors in OpenAI's shape, with the status that says whether to try again."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
import weakref
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from inference_svc import errors
from inference_svc.api.generate_call import MAX_MESSAGES
from inference_svc.api.http.chat.endpoint import ChatBody
from inference_svc.api.http.completions import CompletionBody
from inference_svc.api.http.errors import ERROR_STATUSES, error_object
from inference_svc.api.http.request import (
    MAX_BODY_BYTES,
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_STRINGS,
    MAX_VALUES,
    Body,
    Turns,
    parse_body,
)
from servicekit.errors import InvalidArgument, PermissionDenied, Unauthenticated
from tests.support.error_kinds import kinds_of
from tests.support.inference.front import Front
from tests.support.inference.serving import digest_of
from tests.support.wait import until_async

RETRIED = {408, 409, 429, *range(500, 600)}
"""Statuses upon which OpenAI's client tries again."""
CHAT = "/v1/chat/completions"
VALID = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


def test_every_error_has_a_status() -> None:
    assert set(kinds_of(errors)) < set(ERROR_STATUSES)


@pytest.mark.slow
def test_engine_errors_reach_the_caller(serve_http) -> None:
    found, wanted = {}, {}

    async def body(front: Front) -> None:
        for kind, status in ERROR_STATUSES.items():
            error = kind("the engine's message", subject="adapter")
            front.engine.errors[digest_of("upper")] = error
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError) as caught:
                    await front.complete(model="upper", stream=stream)
                case, error = f"{kind.__name__}, {stream=}", caught.value
                found[case] = (error.status_code, error.type, error.code)
                wanted[case] = tuple(status)
                assert error.body["message"].startswith("the engine's message"), case

    serve_http(body, store=True)
    assert found == wanted


def test_lasting_errors_are_not_retried() -> None:
    lasting = {
        Unauthenticated,
        PermissionDenied,
        InvalidArgument,
        errors.AdapterNotFound,
        errors.ImageNotFound,
        errors.AdapterUnusable,
        errors.TokenizerChanged,
        errors.ChatTemplateInvalid,
        errors.NoRoom,
        errors.NotFinite,
        errors.TemplateTimeout,
        errors.GrammarRefused,
        errors.ImageFetchFailed,  # of another host
    }
    for kind, status in ERROR_STATUSES.items():
        assert (status.status in RETRIED) == (kind not in lasting), kind


def test_full_queue_has_a_retry_time(serve_http) -> None:
    async def body(front: Front) -> None:
        full = errors.QueueFull("too many wait", retry_after_s=1.25)
        front.engine.errors[digest_of("upper")] = full
        with pytest.raises(openai.RateLimitError) as caught:
            await front.complete(model="upper")
        assert caught.value.response.headers["retry-after"] == "2"
        with pytest.raises(openai.RateLimitError):
            await front.complete(model="upper", n=3)
        await until_async(lambda: front.engine.num_running == 0)

    serve_http(body, store=True)


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("gone", 404, "model_not_found"),
        ("wide", 400, "adapter_unusable"),
        ("foreign", 400, "adapter_unusable"),
    ],
)
def test_adapters_that_cannot_be_served(serve_http, name: str, status: int, code: str) -> None:
    async def body(front: Front) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await front.chat(model=name)
        error = caught.value
        assert (error.status_code, error.code, error.param) == (status, code, "model")

    serve_http(body, store=True)


def test_without_a_store_no_adapter_is_found(serve_http) -> None:
    async def body(front: Front) -> None:
        with pytest.raises(openai.NotFoundError, match="no adapter store"):
            await front.chat(model="upper")

    serve_http(body)


NO_REQUESTS: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"{", {}, 400, "the body: is not JSON: "),
    (b"[]", {}, 400, "the body: "),
    (b'"x"', {}, 400, "the body: "),
    (b"", {}, 400, "the body: is not JSON: "),
    (b"\xff\xfe", {}, 400, "the body: is not JSON: "),
    (b"[" * 10_000, {}, 400, "the body: is not JSON: "),
    (b"[" * 100_000, {}, 400, f"at most {MAX_CONTAINERS} objects and lists"),
    (json.dumps(VALID).replace("hi", "\\ud800").encode(), {}, 400, "the body: is not JSON: "),
    (b"{}", {}, 400, "messages: is missing"),
    (b'{"mdoel": "base"}', {}, 400, "messages: is missing"),
    (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
    (b"x" * (MAX_BODY_BYTES + 1), {}, 413, f"at most {MAX_BODY_BYTES} bytes"),
    (json.dumps(VALID).encode(), {"x-request-id": "a b"}, 400, "x-request-id must be"),
    (json.dumps(VALID).encode(), {"x-request-id": "x" * 129}, 400, "x-request-id must be"),
]


def test_malformed_requests(serve_http) -> None:
    async def body(front: Front) -> None:
        for content, extra, status, text in NO_REQUESTS:
            headers = {"content-type": "application/json", **extra}
            answer = await front.raw.post(CHAT, content=content, headers=headers)
            assert answer.status_code == status, content[:30]
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert text in error["message"], content[:30]
        assert (await front.chat()).choices, "the server goes on"

    serve_http(body)


def test_chunked_body_is_bounded(serve_http) -> None:
    async def large() -> Any:
        for _ in range(100):
            yield b" " * 65536

    async def body(front: Front) -> None:
        headers = {"content-type": "application/json"}
        answer = await front.raw.post(CHAT, content=large(), headers=headers)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"

    serve_http(body)


async def _write_much(writer: asyncio.StreamWriter) -> None:
    for _ in range(2000):
        writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize("path", [CHAT, "/v1/nothing"])
def test_endless_body_is_cut_off(serve_http, path: str) -> None:
    async def body(front: Front) -> None:
        host, port = front.running.server.http_address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        with pytest.raises(ConnectionError):
            await _write_much(writer)
        writer.close()

    serve_http(body)


@pytest.mark.parametrize("action", ["load", "unload"])
def test_small_bodies_where_adapters_are_loaded(serve_http, action: str) -> None:
    async def body(front: Front) -> None:
        answer = await front.post(f"/v1/{action}_lora_adapter", {"lora_name": "x" * 70_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    serve_http(body)


@pytest.mark.parametrize("name", ["BODY_SECONDS", "BODY_GRACE_SECONDS"])
def test_slow_body_times_out(serve_http, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"inference_svc.api.http.request.{name}", 0.1)

    async def body(front: Front) -> None:
        host, port = front.running.server.http_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 100\r\n\r\n{".encode()
        )
        answer = asyncio.create_task(reader.readline())
        for _ in range(100):  # a byte from time to time is no progress
            writer.write(b" ")
            if (await asyncio.wait({answer}, timeout=0.01))[0]:
                break
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        writer.close()

    serve_http(body)


def test_other_paths_and_methods(serve_http) -> None:
    async def body(front: Front) -> None:
        for method, path, status, code in (
            ("GET", "/v1/nothing", 404, "not_found"),
            ("GET", CHAT, 405, "method_not_allowed"),
            ("POST", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/v1/chat/completions/", 404, "not_found"),
        ):
            answer = await front.raw.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    serve_http(body)


def test_bugs_are_not_shown() -> None:
    answer, content = error_object(ValueError("secret"), {})
    assert answer.status == 500
    assert content == {
        "error": {
            "message": "internal error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


def many(unit: str, count: int) -> str:
    return ",".join([unit] * count)


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        (f"[{many('[]', MAX_CONTAINERS)}]", f"{MAX_CONTAINERS} objects and lists"),
        (f"{{{many(chr(34) * 2 + ':1', MAX_KEYS + 10)}}}", f"{MAX_KEYS + 8} keys"),
        (f"[{many('1', MAX_VALUES + 2)}]", f"{MAX_VALUES} values"),
        (f"[{many(chr(34) * 2, MAX_STRINGS)}]", f"{MAX_STRINGS} strings"),
    ],
)
def test_bodies_of_many_parts_are_refused_before_they_are_parsed(metadata: str, parts: str) -> None:
    data = f'{{"model": "base", "prompt": "x", "metadata": {metadata}}}'.encode()
    with pytest.raises(InvalidArgument, match=parts):
        parse_body(data, CompletionBody)


def test_parts_in_strings_do_not_count() -> None:
    text = '[{"a\\\\": [1, 2]}, ' * MAX_STRINGS
    data = json.dumps({"model": "base", "prompt": text}).encode()
    assert parse_body(data, CompletionBody).prompt == (text,)
    ids = [9] * MAX_VALUES
    data = json.dumps({"model": "base", "prompt": ids}, separators=(",", ":")).encode()
    assert parse_body(data, CompletionBody).prompt == (tuple(ids),)


def test_others_have_as_much_time_as_parsing_takes() -> None:
    turns, starts_s, ends_s = Turns(), [], []
    for _ in range(2):
        with turns.turn():
            starts_s.append(time.monotonic())
            end_s = time.thread_time() + 0.02
            while time.thread_time() < end_s:
                pass
            ends_s.append(time.monotonic())
    assert starts_s[1] - ends_s[0] >= 0.02


def test_a_long_context_has_more_values() -> None:
    ids = [9] * (MAX_VALUES + 10)
    data = json.dumps({"model": "base", "prompt": ids}).encode()
    assert parse_body(data, CompletionBody, MAX_VALUES + 20).prompt == (tuple(ids),)
    with pytest.raises(InvalidArgument, match=f"at most {MAX_VALUES} values"):
        parse_body(data, CompletionBody)


def test_chats_have_as_many_messages_as_over_grpc() -> None:
    messages = [{"role": "user", "content": "x"}] * MAX_MESSAGES
    data = json.dumps({"model": "base", "messages": messages}).encode()
    assert len(parse_body(data, ChatBody).messages) == MAX_MESSAGES
    data = json.dumps({"model": "base", "messages": [*messages, messages[0]]}).encode()
    with pytest.raises(InvalidArgument, match=f"at most {MAX_MESSAGES} items"):
        parse_body(data, ChatBody)


class Held(bytearray):
    """Can be referred to weakly."""


def test_refused_request_leaves_nothing_on_its_connection(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[weakref.ref[Held]] = []

    def refuse(data: bytes, *options: Any) -> Any:
        held = Held(data)
        bodies.append(weakref.ref(held))
        try:
            raise ValueError("the parser's own")
        except ValueError:
            raise InvalidArgument("refused") from None

    monkeypatch.setattr("inference_svc.api.http.request.parse_body", refuse)

    async def body(front: Front) -> None:
        gc.disable()
        try:
            answer = await front.raw.post(CHAT, json=VALID)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "refused")
            await until_async(lambda: bodies[0]() is None)
        finally:
            gc.enable()
        assert front.connections.all_open, "the connection is kept"

    serve_http(body)


def test_disconnect_while_the_body_is_parsed(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr("inference_svc.api.http.request.INLINE_BODY_BYTES", 0)
    monkeypatch.setattr("inference_svc.api.http.request.parse_body", lambda *call: ends.wait(60))

    async def body(front: Front) -> None:
        asking = asyncio.create_task(front.chat())
        await until_async(lambda: bool(front.running.server._prompts.threads.used))  # type: ignore[union-attr]
        asking.cancel()
        await front.until_metric(f'http_requests_total{{route="{CHAT}",status="499"}} 1.0')
        ends.set()

    serve_http(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"user": "u" * 513}, "user"),
        ({"safety_identifier": "u" * 513}, "safety_identifier"),
        ({"prompt_cache_key": "u" * 513}, "prompt_cache_key"),
        ({"service_tier": "u" * 513}, "service_tier"),
        ({"stop": ["s"] * 17}, "stop"),
        ({"stop": ["s" * 257]}, "stop[0]"),
        ({"unknown": [1]}, "unknown"),
    ],
)
def test_fields_without_effect_are_bounded(fields: dict[str, Any], param: str) -> None:
    data = json.dumps({"model": "base", "prompt": "x", **fields}).encode()
    with pytest.raises(InvalidArgument) as caught:
        parse_body(data, CompletionBody)
    assert caught.value.subject.startswith(param)


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "n" * 257),
        ("id", "i" * 513),
        ("id", 5),
        ("annotations", [{}] * 1025),
        ("reasoning_content", ["text"]),
        ("reasoning", {}),
        ("reasoning_details", [0] * 1025),
        ("thinking_blocks", "text"),
        ("refusal", "no"),
        ("audio", {"id": "a"}),
        ("tool_calls", [CALL] * 129),
        ("tool_calls", 5),
        ("tool_call_id", "i" * 513),
        ("prefix", True),
    ],
)
def test_fields_of_messages_without_effect_are_bounded(field: str, value: Any) -> None:
    message = {"role": "assistant", "content": "a", field: value}
    data = json.dumps({"model": "base", "messages": [message]}).encode()
    with pytest.raises(InvalidArgument) as caught:
        parse_body(data, ChatBody)
    assert caught.value.subject == f"messages[0].{field}"


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_first_error_ends_the_validation(kind: type[Body]) -> None:
    """An error for each item of a large body would take minutes, and gigabytes."""
    many: dict[str, Any] = {
        "messages": [{}] * 1000,
        "prompt": [[]] * 1000,
        "stop": [5] * 1000,
        "stop_token_ids": ["x"] * 1000,
        "modalities": [5] * 1000,
    }
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(many))
    assert caught.value.error_count() < 10


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model: must be a string"),
    ({"model": ""}, "model: must not be empty"),
    ({"messages": "hi"}, "messages: must be a list"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": [1]}, "messages[0]: must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
    ({"n": 1.5}, "n: must be an integer"),
    ({"n": 0}, "n: must be at least 1"),
    ({"n": 129}, "n: must be at most 128"),
    ({"priority": 1 << 31}, "priority: must be less than 2147483648"),
    ({"temperature": "warm"}, "temperature: must be a number"),
    ({"stream": "yes"}, "stream: must be true or false"),
    ({"stop": ["a"] * 17}, "stop: must have at most 16 items"),
    ({"stop": "a" * 257}, "stop[0]: must have at most 256 characters"),
    ({"user": "u" * 513}, "user: must have at most 512 characters"),
    ({"store": True}, "store: must be false"),
    ({"tool_choice": "all"}, 'tool_choice: must be "none", "auto", "required", {"type"'),
    ({"tools": [{}]}, "tools[0].type: is missing"),
    ({"functions": [{}]}, "functions: must be empty: it has no effect here"),
    ({"logit_bias": {"1": 2}}, "logit_bias: must be empty: it has no effect here"),
    ({"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages[0].audio: must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        'messages[0].content: an image must be {"type": "image_url", "image_url": {"url": ',
    ),
    ({"max_tokns": 1}, "max_tokns: unknown field"),
]


def test_what_is_refused_is_said_in_our_words(serve_http) -> None:
    async def body(front: Front) -> None:
        for fields, message in WRONG_FIELDS:
            answer = await front.post(CHAT, {**VALID, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message), fields

    serve_http(body)


def test_every_problem_of_a_body_has_words_of_ours() -> None:
    """Whatever is wrong with whichever field, the validator's own text stays inside."""
    wrong = [5, -5, 1.5, True, "x", "", [], ["x"], {}, {"a": 1}, None, 10**30, "y" * 2000, [None]]
    said = set()
    for kind in (ChatBody, CompletionBody):
        valid = VALID if kind is ChatBody else {"model": "base", "prompt": "a"}
        for name in kind.model_fields:
            for value in wrong:
                try:
                    parse_body(json.dumps({**valid, name: value}).encode(), kind)
                except InvalidArgument as error:
                    said.add(error.message)
    assert len(said) > 60
    assert [text for text in said if re.search("Input|should|valid|array", text)] == []


def test_an_unknown_model_points_to_the_list(serve_http) -> None:
    async def body(front: Front) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await front.chat(model="gone")
        assert "; GET /v1/models lists the models" in caught.value.body["message"]
        assert (await front.raw.get("/v1/models")).status_code == 200

    serve_http(body, store=True)


def test_paths_and_methods_that_are_not_there(serve_http) -> None:
    async def body(front: Front) -> None:
        nowhere = await front.post("/completions", VALID)
        assert nowhere.status_code == 404
        message = nowhere.json()["error"]["message"]
        assert "the API is at /v1/chat/completions, " in message
        assert "/v1/responses" in message
        wrong = await front.raw.get(CHAT)
        assert wrong.status_code == 405
        assert wrong.json()["error"]["message"] == "this path takes POST only"

    serve_http(body)
