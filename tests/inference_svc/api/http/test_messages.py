"""/v1/messages, as Anthropic's clients send and read it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from inference_svc.api.http.messages.answer import Blocks
from inference_svc.api.http.messages.body import MessagesBody
from inference_svc.api.http.responses.items import Items
from inference_svc.api.tools import read_delta
from inference_svc.core import FinishReason
from inference_svc.frontend.output_stream import Delta
from inference_svc.text.answers.families import PARSERS, AnswerReader, AnswerSyntax
from inference_svc.text.chat import MessageImage, Tool
from inference_svc.text.tokenizer import Tokenizer
from tests.support.inference.front import BOTH, Front, prompt_of, thinking_text

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA},
    {"name": "clock", "type": "custom", "cache_control": {"type": "ephemeral"}},
]
USER = {"role": "user", "content": "rain?"}
COUNTED: dict[str, Any] = {"model": "base", "messages": [USER]}
ASKED: dict[str, Any] = {"model": "base", "max_tokens": 500, "messages": [USER]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return thinking_text(tmp_path_factory.mktemp("thinking"))


@pytest.fixture
def serve_messages(serve_http: Any, text: Tokenizer) -> Any:
    def run(body: Any, *answers: str) -> Any:
        async def scripted(front: Front) -> Any:
            front.engine.answers += [tuple(text.encode(each)) for each in answers]
            return await body(front)

        return serve_http(scripted, text=text, max_model_len=2048)

    return run


async def ask(front: Front, **fields: Any) -> dict[str, Any]:
    answer = await front.post(PATH, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(front: Front, **fields: Any) -> list[dict[str, Any]]:
    answer = await front.post(PATH, {**ASKED, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_flow_with_two_tools(serve_messages: Any, text: Tokenizer) -> None:
    """The answer goes back into the history as it is."""

    async def body(front: Front) -> None:
        system = [{"type": "text", "text": each} for each in ("Be brief.", "Be kind.")]
        first = await ask(front, tools=TOOLS, system=system, tool_choice={"type": "auto"})
        assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "base")
        assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
        thinking, said, weather, clock = first["content"]
        assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert said == {"type": "text", "text": "I look."}
        assert (weather["name"], weather["input"]) == ("get_weather", {"city": "Bern"})
        assert (clock["name"], clock["input"]) == ("clock", {})
        assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in prompt_of(front, text)
        num_prompt = len(front.engine.submitted[-1].prompt_token_ids)
        usage = first["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": content,
                "is_error": False,
            }
            for call, content in ((weather, "12 degrees"), (clock, [{"type": "text", "text": "9"}]))
        ]
        history = [
            USER,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
        ]
        last = await ask(front, tools=TOOLS, messages=history)
        assert (last["stop_reason"], last["content"]) == (
            "end_turn",
            [{"type": "text", "text": "It rains."}],
        )
        prompt = prompt_of(front, text)
        for part in ("<think>\nhm\n</think>", '"city": "Bern"', "12 degrees", "9", "user\nSo?"):
            assert part in prompt
        count = await front.post(
            f"{PATH}/count_tokens", {"model": "base", "messages": history, "tools": TOOLS}
        )
        assert count.json() == {"input_tokens": len(front.engine.submitted[-1].prompt_token_ids)}

    serve_messages(body, BOTH, "It rains.")


def test_a_stream_has_the_same_blocks(serve_messages: Any) -> None:
    async def body(front: Front) -> None:
        found = await events(front, tools=TOOLS)
        assert [each["type"] for each in (found[0], *found[-2:])] == [
            "message_start",
            "message_delta",
            "message_stop",
        ]
        assert found[0]["message"]["content"] == []
        blocks: list[dict[str, Any]] = []
        for event in found[1:-2]:
            assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "pieces": []})
            elif event["type"] == "content_block_delta":
                [piece] = {*event["delta"]} - {"type"}
                blocks[-1]["pieces"].append(event["delta"][piece])
        kinds = [each["type"] for each in blocks]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        pieces = ["".join(each["pieces"]) for each in blocks]
        assert pieces == ["hm", "I look.", '{"city": "Bern"}', "{}"]
        assert len(blocks[2]["pieces"]) > 2, "arguments come as they are written"
        assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert found[-2]["usage"]["output_tokens"] > 10

    serve_messages(body, BOTH)


def test_reasons_and_options(serve_messages: Any, text: Tokenizer) -> None:
    broken = '<tool_call>\n{"name": "clock", "arguments": {"a": 1,}}\n</tool_call>'

    async def body(front: Front) -> None:
        found = await ask(front, stop_sequences=["never", "rai"], temperature=1, top_k=5)
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "rai")
        assert found["content"] == [{"type": "text", "text": "It "}]
        found = await ask(front, max_tokens=2, metadata={"user_id": "u"})
        assert found["stop_reason"] == "max_tokens"
        thinking = {"type": "enabled", "budget_tokens": 9}
        prefilled = [USER, {"role": "assistant", "content": "Well, it"}]
        await ask(front, messages=prefilled, thinking=thinking)
        assert prompt_of(front, text).endswith("Well, it")
        budget = front.engine.submitted[-1].budget
        assert budget is not None
        assert budget.max_tokens == 9
        await ask(front, thinking={"type": "disabled"})
        assert prompt_of(front, text).endswith("<think>\n\n</think>\n\n")
        [call] = (await ask(front, tools=TOOLS))["content"]
        assert (call["input"], call["input_text"]) == ({}, '{"a": 1,}')
        assert "no JSON" in call["input_error"]

    serve_messages(body, "It rains.", "It rains.", "x", "x", broken)


def test_hints_of_agents_are_taken(serve_messages: Any, text: Tokenizer) -> None:
    """An effort goes to templates that read it, and edits leave out thoughts as templates do."""
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    tool = {**TOOLS[0], "allowed_callers": ["direct"], "defer_loading": False}

    async def body(front: Front) -> None:
        for fields in ({"context_management": keep}, {"context_management": {"edits": []}}):
            await ask(
                front, tools=[tool], mcp_servers=[], output_config={"effort": "max"}, **fields
            )
        count = await front.post(f"{PATH}/count_tokens", {**COUNTED, "context_management": keep})
        assert count.json()["input_tokens"] > 0

    serve_messages(body, "x", "x")


def test_an_effort_changes_nothing_where_templates_have_none(serve_http: Any) -> None:
    async def body(front: Front) -> None:
        assert await ask(front, output_config={"effort": "low"})

    serve_http(body)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_left_out_where_that_is_asked_for(serve_messages: Any, stream: bool) -> None:
    hidden = {"type": "adaptive", "display": "omitted"}

    async def body(front: Front) -> None:
        if stream:
            found = await events(front, thinking=hidden)
            deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
            assert "".join(delta["text"] for delta in deltas) == "yes"
            assert [each["type"] for each in found].count("content_block_start") == 2
        else:
            thought, said = (await ask(front, thinking=hidden))["content"]
            assert thought == {"type": "thinking", "thinking": "", "signature": ""}
            assert said["text"] == "yes"

    serve_messages(body, "<think>hm</think>\n\nyes")


def test_a_text_after_a_call_does_not_cut_it(text: Tokenizer) -> None:
    """Of a slow reader's delta, which ends a call and has more after it; also in Responses."""
    pieces = ['<tool_call>\n{"name": "clock", "arguments": {"a": ', "1}}\n</tool_call>Done."]
    pieces.append('<tool_call>\n{"name": "clock"}\n</tool_call>Bye.')

    async def events_of(answer: Blocks | Items) -> list[str]:
        reader = AnswerReader(AnswerSyntax(PARSERS["hermes"]), (Tool("clock"),))
        kinds = []
        for piece in pieces:
            delta = Delta(text=piece, finish_reason=FinishReason.STOP if "Bye" in piece else None)
            await read_delta(reader, delta)
            kinds += [each.split(b"\n")[0].decode() for each in answer.add(delta)]
        kinds += [each.split(b"\n")[0].decode() for each in answer.end(delta)]
        return kinds

    blocks, items = Blocks({}, 1, 100), Items({"id": "resp_1"})
    assert asyncio.run(events_of(blocks)).count("event: content_block_stop") == 4
    asyncio.run(events_of(items))
    first, done, second, bye = blocks.whole()["content"]
    assert (first["input"], second["input"]) == ({"a": 1}, {})
    assert (done["text"], bye["text"]) == ("Done.", "Bye.")
    called, said, again, last = items.whole()["output"]
    assert (called["arguments"], again["arguments"]) == ('{"a": 1}', "{}")
    assert (said["content"][0]["text"], last["content"][0]["text"]) == ("Done.", "Bye.")


@pytest.mark.parametrize("value", ["1e999", '"\\ud800"'])
def test_arguments_that_other_json_cannot_have_are_said_to_be_so(
    serve_messages: Any, value: str
) -> None:
    """They are JSON, but a number is too large, or there is half of a character."""
    arguments = f'{{"city": {value}}}'

    async def body(front: Front) -> None:
        answer = await ask(front, tools=TOOLS)
        [call] = answer["content"]
        assert (call["input"], call["input_text"]) == ({}, arguments)
        assert call["input_error"].startswith("the arguments cannot be written as JSON again: ")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "no"}
        history = [USER, {**answer, "content": [call]}, {"role": "user", "content": [result]}]
        messages = [{name: each[name] for name in ("role", "content")} for each in history]
        await ask(front, tools=TOOLS, messages=messages)

    called = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    serve_messages(body, called, "It rains.")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"temprature": 1}, "temprature: unknown field; did you mean temperature?"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]: the type must be",
    ),
    ({"context_management": {"edits": ["all"]}}, "context_management.edits[0]"),
    ({"thinking": {"type": "adaptive", "display": "none"}}, "thinking.display"),
    *(
        ({"messages": [USER, {"role": role, "content": [block]}]}, name)
        for role, block, name in (
            ("user", {"type": "image", "source": {}}, "messages[1].content[0]"),
            ("user", {"type": "thinking", "thinking": "a"}, "messages[1].content[0]"),
            ("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}, "messages[1]"),
            (
                "user",
                {"type": "tool_result", "tool_use_id": "1"},
                "messages[1].content[0].tool_use_id",
            ),
        )
    ),
]


def test_errors_have_anthropics_form_and_name_the_field(serve_messages: Any) -> None:
    async def body(front: Front) -> None:
        for fields, name in BAD:
            answer = await front.post(PATH, {**ASKED, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), error
            assert error["type"] == "invalid_request_error"
            assert name in error["message"], error
        answer = await front.post(PATH, {**ASKED, "model": "none"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = await front.raw.post(PATH, content="x", headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["type"]) == (415, "error")
        assert not front.engine.submitted

    serve_messages(body)


def test_results_of_tools_have_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "YQ=="}
    image = {"type": "image", "source": source}
    words = [{"type": "text", "text": each} for each in ("two", "cats", "here")]
    call = {"type": "tool_use", "id": "1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1"}
    messages = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result | {"content": [*words[:2], image, words[2]]}]},
    ]
    body = MessagesBody.model_validate(ASKED | {"messages": messages})
    last = body.to_prompt().messages[-1]
    where = "messages[2].content[0].content[2].source.data"
    assert last.images == (MessageImage(len("two\n\ncats"), b"a", where),)
    assert (last.role, last.content, last.tool_call_id) == ("tool", "two\n\ncatshere", "1")
    document = {"type": "document", "source": source}
    messages[2] = {"role": "user", "content": [result | {"content": [document]}]}
    with pytest.raises(ValidationError, match="'text', 'image'"):
        MessagesBody.model_validate(ASKED | {"messages": messages})
