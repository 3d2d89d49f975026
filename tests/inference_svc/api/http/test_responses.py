"""/v1/responses as OpenAI's client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from inference_svc.text.tokenizer import Tokenizer
from tests.support.inference.front import BOTH, Front, prompt_of

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "clock", "parameters": None},
]


def test_a_flow_with_two_tools_and_an_adapter(serve_tools: Any, tooled: Tokenizer) -> None:
    """The output goes back as input."""

    async def body(front: Front) -> None:
        answer = await front.client.responses.create(
            model="french", input="rain?", instructions="be brief", tools=TOOLS, store=False
        )
        assert (answer.status, answer.object, answer.model) == (
            "completed",
            "response",
            "french@1",
        )
        thoughts, message, weather, clock = answer.output
        assert thoughts.content[0].text == "hm"
        assert answer.output_text == message.content[0].text == "I look."
        assert (weather.type, weather.name) == ("function_call", "get_weather")
        assert (weather.arguments, clock.arguments) == ('{"city": "Bern"}', "{}")
        assert answer.usage.input_tokens == len(front.engine.submitted[0].prompt_token_ids)
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        assert prompt_of(front, tooled).count("be brief") == 1
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in ((weather, "12 degrees"), (clock, "noon"))
        ]
        others = {"parsed_arguments": {}, "namespace": None, "caller": None}
        kept = {**clock.to_dict(), **others}  # as the client's helpers have it
        outputs = [thoughts, message, weather, kept]
        history = [{"role": "user", "content": "rain?"}, *outputs, *results]
        last = await front.client.responses.create(model="french", input=history, tools=TOOLS)
        assert last.output_text == "It rains."
        prompt = prompt_of(front, tooled)
        assert "<think>\nhm\n</think>\n\nI look.<tool_call>" in prompt
        assert prompt.count("<|im_start|>assistant") == 2
        assert "<tool_response>\nnoon\n</tool_response>" in prompt

    serve_tools(body, BOTH, "It rains.", store=True)


def test_a_stream_has_the_same(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        async with front.client.responses.stream(
            model="base", input="rain?", tools=TOOLS
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        for kind in ("reasoning_text", "output_text", "function_call_arguments"):
            assert f"response.{kind}.delta" in kinds
            assert f"response.{kind}.done" in kinds
        numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
        assert numbers == sorted(numbers)
        assert [item.type for item in final.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert final.output_text == "I look."
        assert final.output[2].arguments == '{"city": "Bern"}'

    serve_tools(body, BOTH)


def test_options(serve_tools: Any, tooled: Tokenizer) -> None:
    async def body(front: Front) -> None:
        answer = await front.client.responses.create(
            model="base",
            input=[
                {"role": "developer", "content": [{"type": "input_text", "text": "kind"}]},
                {"role": "user", "content": "hi"},
            ],
            reasoning={"effort": "none", "summary": "detailed"},
            include=["reasoning.encrypted_content"],
            max_output_tokens=2,
            temperature=0.5,
            metadata={"a": "b"},
            text={"verbosity": "medium"},
            prompt_cache_retention="24h",
            tools=[{**TOOLS[0], "defer_loading": False, "allowed_callers": ["direct"]}],
            extra_body={"prompt_cache_options": {"mode": "implicit"}},
        )
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        [request] = front.engine.submitted
        assert (request.sampling.max_tokens, request.sampling.temperature) == (2, 0.5)
        prompt = prompt_of(front, tooled)
        assert "system\nkind" in prompt
        assert prompt.endswith("</think>\n\n")
        assert (answer.metadata, answer.store, answer.tool_choice) == ({"a": "b"}, False, "auto")

    serve_tools(body, "a longer answer")


def test_some_tools_are_allowed(serve_tools: Any, tooled: Tokenizer) -> None:
    """The model sees no others."""
    first, second = (each["name"] for each in TOOLS)
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": second}],
    }

    async def body(front: Front) -> None:
        stream = await front.client.responses.create(
            model="base",
            input="rain?",
            stream=True,
            stream_options={"include_obfuscation": False},
            tools=TOOLS,
            tool_choice=choice,
        )
        *_, last = [event async for event in stream]
        assert last.response.tool_choice.model_dump() == choice
        prompt = prompt_of(front, tooled)
        assert second in prompt
        assert first not in prompt

    serve_tools(body, "x")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2]"),
    ({"input": [{"role": "user", "content": "a", "prefix": True}]}, "input[0].message.prefix"),
    ({"input": [{"role": "banana", "content": "a"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].message.content",
    ),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, "tool_choice"),
    ({"n": 2}, "n"),
]


def test_the_rest_is_refused_by_name(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        for fields, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await front.client.responses.create(model="base", input="a", extra_body=fields)
            assert caught.value.param == param, fields
            stored = param in ("previous_response_id", "conversation")
            assert ("send all items as input" in caught.value.body["message"]) == stored
        assert not front.engine.submitted

    serve_tools(body)
