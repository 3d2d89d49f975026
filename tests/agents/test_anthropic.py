"""Anthropic's client for Python: a flow with tools, whole and streamed, forms and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.agents import flow

pytestmark = [pytest.mark.agents, pytest.mark.processes]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": each.__name__, "description": each.__doc__, "input_schema": CITY}
    for each in flow.TOOLS
]
CHOICES = (
    {"type": "tool", "name": "get_weather"},
    {"type": "tool", "name": "get_time"},
    {"type": "any"},
)


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    address = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_flow_with_two_tools(client: anthropic.Anthropic, is_streamed: bool) -> None:
    """The answers go back into the history as they are, and a form may be asked for, too."""
    messages: list[Any] = [{"role": "user", "content": f"{flow.QUESTION} {flow.ASK_FOR_JSON}"}]
    form = {"type": "json_schema", "schema": flow.Weather.model_json_schema()}
    options: Any = {
        "model": flow.ADAPTER,
        "max_tokens": flow.MAX_TOKENS,
        "tools": TOOLS,
        "extra_body": {"output_config": {"format": form}, "top_k": 1},
    }

    def answer(**choice: Any) -> Any:
        if not is_streamed:
            return client.messages.create(messages=messages, **options, **choice)
        with client.messages.stream(messages=messages, **options, **choice) as stream:
            return stream.get_final_message()

    for choice in CHOICES:
        done = answer(tool_choice={**choice, "disable_parallel_tool_use": True})
        assert (done.model, done.stop_reason) == (f"{flow.ADAPTER}@1", "tool_use")
        [call] = [block for block in done.content if block.type == "tool_use"]
        result = flow.FUNCTIONS[call.name](**call.input)
        messages += [
            {"role": "assistant", "content": done.content},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}],
            },
        ]
    assert [name for name, _ in flow.CALLED[:2]] == ["get_weather", "get_time"]
    last = answer(tool_choice={"type": "none"})
    [text] = [block.text for block in last.content if block.type == "text"]
    flow.Weather.model_validate(json.loads(text))
    count = client.messages.count_tokens(model=flow.ADAPTER, messages=messages, tools=TOOLS)
    assert count.input_tokens > 50
    assert last.usage.output_tokens > 0


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    user: Any = {"role": "user", "content": "hi"}
    with pytest.raises(anthropic.NotFoundError, match="GET /v1/models"):
        client.messages.create(model="nobody", max_tokens=5, messages=[user])
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    asked: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        client.messages.create(model=flow.ADAPTER, max_tokens=5, messages=asked)
