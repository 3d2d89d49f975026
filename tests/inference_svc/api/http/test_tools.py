"""Tools over HTTP, as OpenAI's client sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from inference_svc.grammars.budget import ThoughtBudget
from inference_svc.grammars.grammar import GrammarKind
from inference_svc.text.tokenizer import Tokenizer
from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import InvalidArgument
from tests.support.inference.front import (
    BOTH,
    CALL,
    THINKING,
    Front,
    prompt_of,
    thinking_text,
)
from tests.support.models.templates import FAMILIES, TOOLED
from tests.support.models.tokenizers import byte_level, save_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "strict": False},
    "cache_control": {"type": "ephemeral"},
}
TOOLS = [WEATHER, CLOCK]
USER = {"role": "user", "content": "rain?"}


def test_a_flow_with_two_tools_and_an_adapter(serve_tools: Any, tooled: Tokenizer) -> None:
    """The answer goes back into the history as the client has it."""

    async def body(front: Front) -> None:
        answer = await front.chat(messages=[USER], tools=TOOLS, model="french")
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert (message.content, message.reasoning_content) == ("I look.", "hm")
        weather, clock = message.tool_calls
        assert (weather.type, weather.function.name) == ("function", "get_weather")
        assert (weather.function.arguments, clock.function.arguments) == ('{"city": "Bern"}', "{}")
        assert weather.id != clock.id
        prompt = prompt_of(front, tooled)
        assert '"name": "get_weather"' in prompt
        assert '"parameters": {"type": "object", "properties": {}}' in prompt
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in ((weather, "12 degrees"), (clock, "noon"))
        ]
        weather.function.parsed_arguments = None  # as helpers of OpenAI's client for Node have it
        clock.function.provider_specific_fields = weather.provider_specific_fields = {"a": 1}
        clock.extra_content = {"google": {"thought_signature": "x"}}
        message.provider_specific_fields = None
        last = await front.chat(messages=[USER, message, *results], tools=TOOLS, model="french")
        assert last.choices[0].finish_reason == "stop"
        assert last.choices[0].message.tool_calls is None
        assert last.choices[0].message.content == "It rains."
        prompt = prompt_of(front, tooled)
        assert f"<think>\nhm\n</think>\n\nI look.{CALL}" in prompt
        assert "<tool_response>\n12 degrees\n</tool_response>" in prompt

    serve_tools(body, BOTH, "It rains.", store=True)


def test_a_stream_has_the_same_calls_in_openais_deltas(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        stream = await front.chat(messages=[USER], tools=TOOLS, stream=True)
        deltas = []
        async for chunk in stream:
            [choice] = chunk.choices
            deltas.append(choice.delta)
            reason = choice.finish_reason
        assert reason == "tool_calls"
        assert "".join(d.content or "" for d in deltas) == "I look."
        thoughts = (d.model_extra.get("reasoning_content") or "" for d in deltas)
        assert "".join(thoughts) == "hm"
        pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
        firsts = [piece for piece in pieces if piece.id]
        assert [(p.index, p.type, p.function.name) for p in firsts] == [
            (0, "function", "get_weather"),
            (1, "function", "clock"),
        ]
        assert len(pieces) > len(firsts), "arguments come as they are written"
        arguments = ["", ""]
        for piece in pieces:
            arguments[piece.index] += piece.function.arguments
        assert arguments == ['{"city": "Bern"}', "{}"]

    serve_tools(body, BOTH)


def test_choices_are_read_apart(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(messages=[USER], tools=TOOLS, n=2)
        first, second = answer.choices
        assert [len(c.message.tool_calls or ()) for c in (first, second)].count(2) == 1
        assert {first.finish_reason, second.finish_reason} == {"tool_calls", "stop"}

    serve_tools(body, BOTH, "It rains.")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_without_parallel_ones(serve_tools: Any, stream: bool) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(
            messages=[USER], tools=TOOLS, parallel_tool_calls=False, stream=stream
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
            assert {call.index for call in calls} == {0}
        else:
            assert len(answer.choices[0].message.tool_calls) == 1

    serve_tools(body, BOTH)


def test_arguments_that_are_no_json_are_said_to_be_so(serve_tools: Any) -> None:
    broken = '<tool_call>\n{"name": "clock", "arguments": {"a": 1,}}\n</tool_call>'

    async def body(front: Front) -> None:
        answer = await front.chat(messages=[USER], tools=TOOLS)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.arguments == '{"a": 1,}'
        assert "no JSON" in call.arguments_error
        stream = await front.chat(messages=[USER], tools=TOOLS, stream=True)
        pieces = [c async for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
        assert "no JSON" in pieces[-1].arguments_error
        history = [USER, answer.choices[0].message, {"role": "tool", "content": "bad arguments"}]
        assert (await front.chat(messages=history, tools=TOOLS)).choices

    serve_tools(body, broken, broken, "sorry")


def test_without_a_choice_the_model_sees_no_tools(serve_tools: Any, tooled: Tokenizer) -> None:
    async def body(front: Front) -> None:
        answer = await front.chat(messages=[USER], tools=TOOLS, tool_choice="none")
        assert '{"name": "get_weather"' in answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None
        assert "get_weather" not in prompt_of(front, tooled)
        answer = await front.chat(messages=[USER], extra_body={"separate_reasoning": False})
        assert "hm" in answer.choices[0].message.content
        assert "reasoning_content" not in answer.choices[0].message.model_extra

    serve_tools(body, CALL, "<think>hm</think>yes")


def test_thoughts_may_be_switched_off(serve_tools: Any, tooled: Tokenizer) -> None:
    """And a prompt may have begun them."""

    async def body(front: Front) -> None:
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = await front.chat(messages=[USER], extra_body=options)
        assert answer.choices[0].message.content == "yes"
        assert prompt_of(front, tooled).endswith("<think>\n\n</think>\n\n")
        await front.chat(messages=[USER], reasoning_effort="none")
        assert prompt_of(front, tooled).endswith("<think>\n\n</think>\n\n")
        begun = {"role": "assistant", "content": "<think>\nso"}
        options = {"continue_final_message": True}
        answer = await front.chat(messages=[USER, begun], extra_body=options)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "yes")

    serve_tools(body, "yes", "yes", "hm</think>yes")


def schema_of_depth(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"items": found}
    return found


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def allowed(mode: str, names: list[str]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    *(
        ({"tools": TOOLS, "tool_choice": allowed(*given)}, "tool_choice")
        for given in (
            ("auto", []),
            ("none", ["clock"]),
            ("auto", ["clock", "x"]),
            ("auto", [""]),
        )
    ),
    ({"tool_choice": allowed("auto", ["clock"])}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool(name="a b")]}, "tools[0]"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1]"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": ["object"]})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=schema_of_depth(33))]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=schema_of_depth(150))]}, "tools[0].function.parameters"),
    ({"tools": [tool(returns={})]}, "tools[0].function.returns"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [tool(description="x" * (1 << 18))]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    *(
        ({"extra_body": {"chat_template_kwargs": value}}, "chat_template_kwargs")
        for value in (
            [],
            {"a": 1},
            {"enable_thinking": []},
            {"enable_thinking": 10**400},
            {"enable_thinking": "x" * 513},
            {"x" * 65: 1},
            dict.fromkeys("abcdefghijklmnopqrs"),
        )
    ),
]


def test_errors_name_the_field(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        for fields, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await front.chat(messages=[USER], **fields)
            assert caught.value.param == param, fields
        deep = json.dumps({"model": "base", "messages": [USER], "tools": [tool()]})
        deep = deep.replace('"name": "f"', '"parameters":' + '{"a":' * 5000 + "1" + "}" * 5000)
        headers = {"content-type": "application/json"}
        answer = await front.raw.post("/v1/chat/completions", content=deep, headers=headers)
        assert answer.status_code == 400
        assert not front.engine.submitted

    serve_tools(body)


def test_the_largest_tools_are_taken(serve_tools: Any) -> None:
    async def body(front: Front) -> None:
        leaf = {"type": "integer", "title": "A", "description": "b", "minimum": 0, "default": 3}
        wide = {"type": "object", "properties": {f"p{i}": leaf for i in range(12)}}
        many = [tool(name=f"f{i}", parameters=wide) for i in range(128)]
        with pytest.raises(openai.BadRequestError, match=r"characters|tokens") as caught:
            await front.chat(messages=[USER], tools=many)
        assert caught.value.param == "messages"
        assert await front.chat(messages=[USER], tools=[tool(parameters=schema_of_depth(32))])

    serve_tools(body, "yes")


@pytest.mark.parametrize(
    ("family", "parser", "reason"),
    [
        ("chatml", "auto", "use an adapter or a model .*--tool-parser"),
        ("qwen3", "none", "--tool-parser"),
        ("chatml", "hermes", "shows no tools"),
    ],
)
def test_tools_that_the_model_cannot_see_or_call_are_refused(
    serve_http: Any, tmp_path: Path, family: str, parser: str, reason: str
) -> None:
    template = {**FAMILIES, **TOOLED}[family]
    text = Tokenizer(save_tokenizer(byte_level(), tmp_path, template), parser)

    async def body(front: Front) -> None:
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await front.chat(messages=[USER], tools=TOOLS)
        assert caught.value.param == "tools"

    serve_http(body, text=text, max_model_len=2048)


@pytest.mark.parametrize("echo", [False, True])
def test_the_python_client_has_the_same(serve_tools: Any, tooled: Tokenizer, echo: bool) -> None:
    """Over gRPC, as typed fields."""
    function = WEATHER["function"]
    tools = [types.Tool(**function), types.Tool(name="clock")]
    user = types.ChatMessage(role="user", content="rain?")

    async def body(front: Front) -> None:
        async with AsyncClient(inference=front.running.server.address) as client:
            first = await client.complete(
                [user],
                tools=tools,
                separate_reasoning=True,
                echo=echo,
                chat_template_kwargs={"enable_thinking": True},
            )
            prompt = tooled.decode(front.engine.submitted[0].prompt_token_ids)
            assert first.text == (prompt if echo else "") + "I look."
            assert (first.reasoning, first.finish_reason) == ("hm", types.FinishReason.STOP)
            weather, clock = first.tool_calls
            assert (weather.name, weather.arguments) == ("get_weather", '{"city": "Bern"}')
            assert (clock.name, clock.arguments, clock.error) == ("clock", "{}", "")
            said = types.ChatMessage(
                role="assistant",
                content=first.text,
                reasoning=first.reasoning,
                tool_calls=[call.message() for call in first.tool_calls],
            )
            result = types.ChatMessage(role="tool", content="12", tool_call_id=weather.id)
            plain = await client.complete([user, said, result], reasoning_effort="low")
            assert "<think>" in plain.text, "the text as it is, for those who do not ask"
            assert "<tool_response>\n12\n" in prompt_of(front, tooled)
            with pytest.raises(InvalidArgument, match="tools: get_weather, clock") as caught:
                await client.complete([user], tools=tools, required_tool="calendar")
            assert caught.value.subject == "chat.tool_choice"
            with pytest.raises(InvalidArgument, match="chat messages"):
                await client.complete("rain?", tools=tools)

    serve_tools(body, BOTH, "<think>hm", "x")


@pytest.mark.processes
@pytest.mark.parametrize("parser", ["auto", "glm", "llama3"])
def test_calls_that_are_required_leave_the_form_out(
    serve_http: Any, tmp_path: Path, parser: str
) -> None:
    """A form is of the text, and the answer has none. With "auto" the model has the choice."""
    text = Tokenizer(save_tokenizer(byte_level(), tmp_path, TOOLED["qwen3"]), parser)
    form = {"response_format": {"type": "json_object"}, "extra_body": {"stop_token_ids": [0]}}
    by_name = {"type": "function", "function": {"name": "clock"}}

    async def body(front: Front) -> None:
        front.engine.answers += [tuple(text.encode("x"))] * 6
        for choice in ("required", by_name, "auto"):
            await front.chat(messages=[USER], tools=TOOLS, tool_choice=choice, **form)
        required, named, auto = (each.grammar for each in front.engine.submitted)
        assert '"get_weather"' not in named.source
        for grammar in (required, named):
            assert grammar.kind in (GrammarKind.CALLS, GrammarKind.THOUGHTS)
            assert grammar.field == "tool_choice"
            assert "either" not in grammar.source
        assert auto.field == "response_format"
        for mode in ("auto", "required"):
            some = allowed(mode, ["clock", "clock"])
            await front.chat(messages=[USER], tools=TOOLS, tool_choice=some, **form)
            grammar = front.engine.submitted[-1].grammar
            assert grammar.part_fields == ("tools[1].function.parameters",)
            assert "get_weather" not in grammar.source + prompt_of(front, text)
        await front.chat(messages=[USER], tools=TOOLS, reasoning_effort="none", **form)
        silent = front.engine.submitted[-1].grammar
        assert silent.kind is GrammarKind.EITHER, "the prompt has ended its thoughts"
        assert '"either"' in auto.source or auto.kind is GrammarKind.EITHER

    serve_http(body, text=text, max_model_len=2048)


@pytest.mark.processes
def test_thoughts_have_a_budget_and_come_before_a_form(serve_http: Any, tmp_path: Path) -> None:
    text = thinking_text(tmp_path)
    begin, end = text.special_id("<think>"), text.special_id("</think>")
    budget = {"thinking_token_budget": 7, "stop_token_ids": [0]}
    form = {"type": "json_object"}

    async def body(front: Front) -> None:
        front.engine.answers += [tuple(text.encode("<think>hm</think>\n\n{}"))] * 4
        answer = await front.chat(messages=[USER], response_format=form, extra_body=budget)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "{}")
        await front.chat(messages=[USER], extra_body={**budget, "separate_reasoning": False})
        async with AsyncClient(inference=front.running.server.address) as client:
            user = types.ChatMessage(role="user", content="rain?")
            await client.complete([user], thinking_token_budget=0)
            with pytest.raises(InvalidArgument, match="only with chat") as caught:
                await client.complete("rain?", thinking_token_budget=0)
            assert caught.value.subject == "thinking_token_budget"
        assert [each.budget for each in front.engine.submitted] == [
            *[ThoughtBudget(7, (begin,), end)] * 2,
            ThoughtBudget(0, (begin,), end),
        ]
        await front.chat(messages=[USER], tools=TOOLS, response_format=form, extra_body=budget)
        assert front.engine.submitted[-1].grammar.kind is GrammarKind.THOUGHTS
        lark = {**budget, "guided_grammar": 'start: "<" "a"'}
        with pytest.raises(openai.BadRequestError, match="a call of a tool may begin") as alike:
            await front.chat(messages=[USER], tools=TOOLS, extra_body=lark)
        assert alike.value.param == "guided_grammar"
        formed, plain, *_ = (each.grammar for each in front.engine.submitted)
        assert (formed.kind, plain) == (GrammarKind.THOUGHTS, None)
        refused = {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "name": "n"}}
        with pytest.raises(openai.BadRequestError, match="Unimplemented") as refusal:
            await front.chat(messages=[USER], response_format=refused, extra_body=budget)
        assert refusal.value.param == "response_format.json_schema.schema"

    serve_http(body, text=text, max_model_len=2048)


@pytest.mark.parametrize(
    ("family", "markers", "reason"),
    [
        ("chatml", THINKING, "finds no thoughts"),
        ("qwen3", ("<think>",), "</think> is no token"),
        ("qwen3", ("</think>",), "<think> is no token"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    serve_http: Any, tmp_path: Path, family: str, markers: tuple[str, ...], reason: str
) -> None:
    text = thinking_text(tmp_path, family, markers)

    async def body(front: Front) -> None:
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await front.chat(messages=[USER], extra_body={"thinking_token_budget": 5})
        assert caught.value.param == "thinking_token_budget"

    serve_http(body, text=text, max_model_len=2048)
