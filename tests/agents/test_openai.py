"""OpenAI's client in Python: both routes, whole and streamed by the client's own helpers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]

CHOICES = ("get_weather", "get_time", "required")
"""The calls that the model has to make, one an answer."""
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"name": each.__name__, "description": each.__doc__, "parameters": CITY, "strict": True}
    for each in flow.TOOLS
]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def call(name: str, arguments: str) -> str:
    return flow.FUNCTIONS[name](**json.loads(arguments))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat_completions(client: openai.OpenAI, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": flow.QUESTION}]
    options: dict[str, Any] = {
        "model": flow.ADAPTER,
        "temperature": 0,
        "max_tokens": flow.MAX_TOKENS,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    }

    def answer(**choice: Any) -> Any:
        if not is_streamed:
            return client.chat.completions.create(messages=messages, **options, **choice)
        with client.chat.completions.stream(messages=messages, **options, **choice) as stream:
            return stream.get_final_completion()

    for name in CHOICES:
        named: Any = {"type": "function", "function": {"name": name}}
        done = answer(tool_choice=name if name == "required" else named)
        assert (done.model, done.choices[0].finish_reason) == (f"{flow.ADAPTER}@1", "tool_calls")
        [made] = done.choices[0].message.tool_calls
        result = call(made.function.name, made.function.arguments)
        messages += [
            done.choices[0].message,
            {"role": "tool", "tool_call_id": made.id, "content": result},
        ]
    last = answer(tool_choice="none").choices[0]
    assert last.message.tool_calls in (None, [])
    assert last.message.content
    assert [name for name, _ in flow.CALLED[:2]] == ["get_weather", "get_time"]
    assert len(flow.CALLED) == len(CHOICES)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(client: openai.OpenAI, is_streamed: bool) -> None:
    items: list[Any] = [{"role": "user", "content": flow.QUESTION}]
    options: dict[str, Any] = {
        "model": flow.ADAPTER,
        "temperature": 0,
        "max_output_tokens": flow.MAX_TOKENS,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
    }

    def answer(**choice: Any) -> Any:
        if not is_streamed:
            return client.responses.create(input=items, **options, **choice)
        with client.responses.stream(input=items, **options, **choice) as stream:
            return stream.get_final_response()

    for name in CHOICES:
        named: Any = {"type": "function", "name": name}
        done = answer(tool_choice=name if name == "required" else named)
        assert (done.model, done.status) == (f"{flow.ADAPTER}@1", "completed")
        [made] = done.output
        result = call(made.name, made.arguments)
        items += done.output
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": result})
    assert answer(tool_choice="none").output_text
    assert [name for name, _ in flow.CALLED[:2]] == ["get_weather", "get_time"]
    assert len(flow.CALLED) == len(CHOICES)


def test_a_history_has_several_calls_in_one_answer(client: openai.OpenAI) -> None:
    """And their results; the model may call some of the tools only."""
    city = '{"city": "Rome"}'
    function = "function"
    calls: list[Any] = [
        {"id": name, "type": function, "function": {"name": name, "arguments": city}}
        for name in flow.FUNCTIONS
    ]
    messages: list[Any] = [
        {"role": "developer", "content": "You help travellers."},
        {"role": "user", "content": flow.QUESTION},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": n, "content": call(n, city)} for n in flow.FUNCTIONS),
        {"role": "user", "content": "And in Bern?"},
    ]
    named: Any = {"type": function, "function": {"name": "get_time"}}
    allowed: Any = {"mode": "required", "tools": [named]}
    done = client.chat.completions.create(
        model=flow.ADAPTER,
        messages=messages,
        max_completion_tokens=flow.MAX_TOKENS,
        temperature=0,
        tools=[{"type": function, "function": each} for each in FUNCTIONS],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    [made] = done.choices[0].message.tool_calls or ()
    assert isinstance(made, ChatCompletionMessageFunctionToolCall)
    assert made.function.name == "get_time"
    items: list[Any] = [{"role": "user", "content": flow.QUESTION}]
    items += [
        {"type": "function_call", "call_id": name, "name": name, "arguments": city}
        for name in flow.FUNCTIONS
    ]
    items += [
        {"type": "function_call_output", "call_id": name, "output": call(name, city)}
        for name in flow.FUNCTIONS
    ]
    response = client.responses.create(
        model=flow.ADAPTER,
        input=items,
        max_output_tokens=20,
        temperature=0,
        reasoning={"effort": "none"},
        tools=[{"type": function, **each} for each in FUNCTIONS],
    )
    assert response.output


def test_answers_with_a_type(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{flow.QUESTION} {flow.ASK_FOR_JSON}"}]
    done = client.chat.completions.parse(
        model=flow.ADAPTER, messages=messages, response_format=flow.Weather, temperature=0
    )
    assert isinstance(done.choices[0].message.parsed, flow.Weather)
    response = client.responses.parse(
        model=flow.ADAPTER, input=messages, text_format=flow.Weather, temperature=0
    )
    assert isinstance(response.output_parsed, flow.Weather)
    with client.responses.stream(
        model=flow.ADAPTER, input=messages, text_format=flow.Weather, temperature=0
    ) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_an_answer_has_a_type_or_calls(client: openai.OpenAI) -> None:
    """Tools and a form in one request: each is valid, and required calls leave the form out."""
    messages: list[Any] = [{"role": "user", "content": f"{flow.QUESTION} {flow.ASK_FOR_JSON}"}]
    options: dict[str, Any] = {
        "model": flow.ADAPTER,
        "max_tokens": flow.MAX_TOKENS,
        "messages": messages,
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
        "response_format": flow.Weather,
    }
    for seed, choice in enumerate(("required", "auto", "auto", "auto")):
        done = client.chat.completions.parse(
            tool_choice=choice, seed=seed, temperature=1.5, **options
        )
        message = done.choices[0].message
        if message.tool_calls:
            call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
        else:
            assert isinstance(message.parsed, flow.Weather)
        assert bool(message.tool_calls) or choice == "auto"
    assert flow.CALLED
