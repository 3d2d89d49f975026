"""Tools through real services with OpenAI's client: a random model, which a grammar makes call
them, and an adapter whose own chat template shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from loadout import types
from tests.support.models.zoo import Zoo
from tests.system.services import Services

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "{{ m.role[0] + ':' + m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": CITY, "clock": EMPTY}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
USER = {"role": "user", "content": "rain?"}


@pytest.fixture(scope="module")
def served(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("tools")
    with Services(zoos("llama"), folder, inference_flags=("--http", "127.0.0.1:0")) as made:
        source = made.source(next(iter(made.zoo.adapter_dirs)), "tooled")
        (Path(source.removeprefix("file://")) / "chat_template.jinja").write_text(TEMPLATE)
        made.client.register("tooled", source, base_model="llama")
        yield made
        made.check_exit_codes()


@pytest.fixture
def client(served: Services) -> Iterator[openai.OpenAI]:
    url = f"http://{served.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_flow_with_two_tools_and_an_adapter(client: openai.OpenAI) -> None:
    history: list[Any] = [USER]
    for round_ in range(3):
        answer = client.chat.completions.create(
            model="tooled",
            messages=history,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=round_,
            max_tokens=150,
        )
        [choice] = answer.choices
        assert (answer.model, choice.finish_reason) == ("tooled@1", "tool_calls")
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        check(call)
        result = {"role": "tool", "tool_call_id": call.id, "content": "12"}
        history = [USER, choice.message, result]
    last = client.chat.completions.create(
        model="tooled", messages=history, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert last.choices[0].message.tool_calls is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_by_name_is_streamed(client: openai.OpenAI, name: str) -> None:
    stream = client.chat.completions.create(
        model="tooled",
        messages=[USER],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        stream=True,
        seed=5,
        max_tokens=150,
    )
    chunks = list(stream)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert (pieces[0].index, pieces[0].function.name) == (0, name)
    arguments = "".join(piece.function.arguments for piece in pieces)
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_python_client_has_the_same(served: Services) -> None:
    done = served.client.complete(
        [types.ChatMessage(role="user", content="rain?")],
        adapter="tooled",
        tools=[types.Tool(name=name, parameters=schema) for name, schema in SCHEMAS.items()],
        required_tool="weather",
        max_tokens=150,
        seed=7,
    )
    [call] = done.tool_calls
    assert (call.name, call.error, done.text) == ("weather", "", "")
    jsonschema.validate(json.loads(call.arguments), CITY)


def test_tools_of_a_model_without_any_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
        client.chat.completions.create(model="llama", messages=[USER], tools=TOOLS)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, "cannot enforce"),
        ({"$ref": "https://example.com/schema"}, "cannot enforce"),
        ({"x-guidance": {}}, "x-guidance"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(
    client: openai.OpenAI, schema: dict[str, Any], reason: str
) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(
            model="tooled", messages=[USER], tools=tools, tool_choice="required", max_tokens=9
        )
    assert caught.value.param == "tools[0].function.parameters"
