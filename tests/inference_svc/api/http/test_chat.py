"""/v1/chat/completions as OpenAI's client sees it."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.text.pieces import Pieces
from tests.support.inference.front import Front

ECHO = "user: hiassistant:"
"""The fake engine's answer to "hi": it repeats its prompt."""


def test_full_response(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat()
        (request,) = front.engine.submitted
        assert (answer.object, answer.model, answer.system_fingerprint) == (
            "chat.completion",
            "base",
            None,
        )
        assert answer.id.startswith("chatcmpl-")
        assert answer.created > 1_700_000_000
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content) == ("assistant", ECHO)
        num_prompt = len(request.prompt_token_ids)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_prompt + 1)
        assert usage.total_tokens == 2 * num_prompt + 1
        assert usage.prompt_tokens_details.cached_tokens == 2

    serve_http(body, kind="byte_level")


def test_stream_has_the_same_content(serve_http) -> None:
    async def body(front: Front) -> None:
        options = {"include_usage": True}
        chunks = [c async for c in await front.chat(stream=True, stream_options=options)]
        *parts, last = chunks
        assert {c.object for c in chunks} == {"chat.completion.chunk"}
        assert len({(c.id, c.created, c.model) for c in chunks}) == 1
        assert [p.choices[0].delta.role for p in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(p.choices[0].delta.content or "" for p in parts) == ECHO
        reasons = [p.choices[0].finish_reason for p in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]
        assert all(p.usage is None for p in parts)
        assert last.choices == []
        assert last.usage.completion_tokens == last.usage.prompt_tokens + 1
        without = [c async for c in await front.chat(stream=True)]
        assert all(c.choices and c.usage is None for c in without)

    serve_http(body, kind="byte_level")


def test_choices_have_consecutive_seeds(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(n=3, seed=2**64 - 2, extra_headers={"x-request-id": "mine"})
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert {c.message.content for c in answer.choices} == {ECHO}
        submitted = front.engine.submitted
        assert [r.sampling.seed for r in submitted] == [2**64 - 2, 2**64 - 1, 0]
        ids = [request.request_id.rpartition("-")[0] for request in submitted]
        assert ids == ["mine-0", "mine-1", "mine-2"]
        num_prompt = len(submitted[0].prompt_token_ids)
        assert answer.usage.prompt_tokens == num_prompt
        assert answer.usage.completion_tokens == 3 * (num_prompt + 1)
        texts = ["", "", ""]
        async for chunk in await front.chat(n=3, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
        assert texts == [ECHO] * 3

    serve_http(body, kind="byte_level")


def test_negative_seed_wraps(serve_http) -> None:
    async def body(front: Front) -> None:
        await front.chat(seed=-1)
        assert front.engine.submitted[0].sampling.seed == 2**64 - 1

    serve_http(body, kind="byte_level")


def test_max_tokens_defaults_to_the_context(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == 64
        for name in ("max_tokens", "max_completion_tokens"):
            answer = await front.chat(**{name: 3})
            assert answer.usage.completion_tokens == 3

    serve_http(body, kind="byte_level")


def test_content_in_parts_and_previous_responses_are_accepted(serve_http, tokenizers: Any) -> None:
    async def body(front: Front) -> None:
        hint = {"cache_control": {"type": "ephemeral"}}
        parts = [{"type": "text", "text": "h", **hint}, {"type": "text", "text": "i"}]
        answer = await front.chat(parts)
        assert answer.choices[0].message.content == ECHO
        previous = (await front.chat(max_tokens=3)).choices[0].message
        await front.chat(messages=[{"role": "user", "content": "a"}, previous.model_dump()])
        prompt = tokenizers["byte_level"].decode(front.engine.submitted[-1].prompt_token_ids)
        assert prompt == f"user: aassistant: {previous.content}assistant:"
        named = {"role": "user", "content": "hi", "name": "ada"}
        assert (await front.chat(messages=[named])).choices[0].message.content == ECHO
        silent = await front.chat(messages=[{"role": "assistant", "content": None}])
        assert silent.choices[0].message.content == "assistant: assistant:"
        for empty in ("", []):
            answer = await front.chat(messages=[{"role": "user", "content": empty}])
            assert answer.choices[0].message.content == "user: assistant:"

    serve_http(body, kind="byte_level")


def test_fields_that_clients_keep_in_their_history_are_accepted(
    serve_http, tokenizers: Any
) -> None:
    """vllm#10463, and the reports next to the fields of Message. vllm#21089,
    lmstudio-bug-tracker#261: an assistant's content may be empty, null or absent."""
    extra = {
        "id": "msg_1",
        "refusal": None,
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.b"}}],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "let me see " * 100,
        "reasoning": "let me see",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        "name": None,
        "parsed": {"a": 1},
    }

    async def body(front: Front) -> None:
        for content in ({"content": "b"}, {"content": ""}, {"content": None}, {}):
            said = {"role": "assistant", **content, **extra}
            await front.chat(messages=[{"role": "user", "content": "a"}, said], max_tokens=1)
            prompt = tokenizers["byte_level"].decode(front.engine.submitted[-1].prompt_token_ids)
            assert prompt == f"user: aassistant: {content.get('content') or ''}assistant:"

    serve_http(body, kind="byte_level")


def test_the_developer_is_the_system_to_templates_that_do_not_know_the_role(
    serve_http, tokenizers: Any
) -> None:
    """sglang#40082, vllm#42407, ogx#6069."""

    async def body(front: Front) -> None:
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "a"}]
        await front.chat(messages=messages, max_tokens=1)
        prompt = tokenizers["byte_level"].decode(front.engine.submitted[-1].prompt_token_ids)
        assert prompt == "system: be kinduser: aassistant:"

    serve_http(body, kind="byte_level")


def test_final_message_is_continued(serve_http, tokenizers: Any) -> None:
    """sglang#3417."""

    async def prompt_of(front: Front, **options: Any) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
        await front.chat(messages=messages, max_tokens=1, extra_body=options)
        ids = front.engine.submitted[-1].prompt_token_ids
        return str(tokenizers["byte_level"].hf.decode(ids))

    async def body(front: Front) -> None:
        whole = "<s>user: a</s><s>assistant: bc</s>"
        assert await prompt_of(front) == whole + "<s>assistant:"
        assert await prompt_of(front, add_generation_prompt=False) == whole
        cut = whole.removesuffix("</s>")
        for given in ({}, {"add_generation_prompt": False}, {"add_special_tokens": False}):
            assert await prompt_of(front, continue_final_message=True, **given) == cut
        with pytest.raises(openai.BadRequestError, match="begins a new message") as caught:
            await prompt_of(front, continue_final_message=True, add_generation_prompt=True)
        assert caught.value.param == "continue_final_message"

    serve_http(body, kind="byte_level")


def test_logprobs_have_tokens_and_their_bytes(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat("é", logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        entry = next(entry for entry in content if entry.token == "é")
        assert entry.bytes == list("é".encode())
        assert entry.logprob == -0.5
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("é", -0.5)] * 2
        assert content[-1].token == "</s>"
        bare = await front.chat(logprobs=True)
        assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)
        streamed = []
        async for chunk in await front.chat("é", logprobs=True, stream=True):
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content
        assert [entry.token for entry in streamed] == [entry.token for entry in content]

    serve_http(body)


def test_infinite_logprobs_are_clipped(tokenizers: Any) -> None:
    formatter = ChatFormatter(0, Pieces(tokenizers["chars"]), includes_ids=False)
    (entry,) = formatter.logprobs([TokenLogprobs.of(5, -math.inf, (5,), (-math.inf,))])["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_token_ids_are_returned_on_request(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(extra_body={"return_token_ids": True})
        (request,) = front.engine.submitted
        token_ids = answer.choices[0].token_ids
        assert token_ids == [*request.prompt_token_ids, 1]
        returned = []
        stream = await front.chat(stream=True, extra_body={"return_token_ids": True})
        async for chunk in stream:
            returned += chunk.choices[0].token_ids
        assert returned == token_ids

    serve_http(body, kind="byte_level")


def test_fields_without_effect_are_accepted(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(
            user="u",
            metadata={"a": "b"},
            store=False,
            logit_bias={},
            response_format={"type": "text"},
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            modalities=["text"],
            verbosity="medium",
            prediction={"type": "content", "content": "a"},
            prompt_cache_retention="24h",
            extra_body={"prompt_cache_options": {"mode": "implicit"}},
            temperature=None,
            stop=None,
        )
        assert answer.choices[0].message.content == ECHO

    serve_http(body, kind="byte_level")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "banana", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "messages[0].prefix"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        "messages[0].tool_call_id",
    ),
    ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
    ({"extra_body": {"continue_final_message": True}}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "a", "nam": "n"}]}, "messages[0].nam"),
    ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"verbosity": "low"}, "verbosity"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
        "guided_regex",
    ),
    ({"extra_body": {"guided_choice": []}}, "guided_choice"),
    ({"extra_body": {"guided_choice": ["a", ""]}}, "guided_choice"),
    ({"extra_body": {"guided_grammar": " "}}, "guided_grammar"),
    (
        {"extra_body": {"structured_outputs": {"structural_tag": "x"}}},
        "structured_outputs.structural_tag",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"extra_body": {"echo": True}}, "echo"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1025}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


def test_errors_name_the_field(serve_http) -> None:
    async def body(front: Front) -> None:
        for fields, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await front.chat(**fields)
            error = caught.value
            assert (error.param, error.type, error.code) == (
                param,
                "invalid_request_error",
                "invalid_argument",
            ), fields
        assert not front.engine.submitted

    serve_http(body)
