"""Chats of any roles under templates of many families: no instruction is lost silently."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inference_svc.text.chat import Chat, ChatMessage, Tool, ToolCall
from inference_svc.text.chat_template import ChatTemplate
from inference_svc.text.conversation import with_names
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.tokenizer import Tokenizer
from servicekit.errors import InvalidArgument
from tests.support.models.templates import FAMILIES, TOOLED
from tests.support.models.tokenizers import byte_level, save_tokenizer

pytestmark = pytest.mark.matrix

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = ("system", "Only say BANANA.")
DEVELOPER = ("developer", " never apologise\n")
USER, ANSWER = ("user", "hi"), ("assistant", "<think>mm</think>hello")
CHATS = {
    "developer": (DEVELOPER, USER),
    "system": (SYSTEM, USER),
    "both": (SYSTEM, DEVELOPER, USER),
    "two system": (SYSTEM, ("system", "no"), USER),
    "late system": (USER, SYSTEM, USER),
    "later system": (SYSTEM, USER, ANSWER, DEVELOPER, USER),
    "two users": (USER, ("user", "a")),
    "turns": (USER, ANSWER, ("user", "what about a longer question?")),
    "flag": (("system", "/no_think"), USER),
}
NO_SYSTEM, ALTERNATE = "System role not supported", "roles must alternate"
LEFT_OUT = r"^messages\[{0}\]\.content: the chat template leaves this system message out"
WITH_SYSTEM = ("developer", "system", "both", "two system", "later system", "flag")
REFUSED = {
    **{("gemma2", chat): NO_SYSTEM for chat in WITH_SYSTEM},
    **{("turns", chat): LEFT_OUT.format(0) for chat in WITH_SYSTEM},
    # Neither in its place, nor at the begin, where two turns of the user would follow.
    **{(name, "late system"): LEFT_OUT.format(1) for name in ("turns", "llama2", "mistral3")},
    **{(name, "two users"): ALTERNATE for name in ("llama2", "mistral3", "gemma2", "gemma3")},
}
"""By family and chat; all others are rendered."""


def chat_of(*messages: tuple[str, str], continues: bool = False) -> Chat:
    return Chat(
        tuple(ChatMessage(*each) for each in messages),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def render(family: str, chat: Chat) -> str:
    return ChatTemplate({**FAMILIES, **TOOLED}[family], SPECIALS).render(chat, 10_000, 5.0)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_instruction_is_in_the_prompt_or_refused(family: str, name: str) -> None:
    """sglang#40082, vllm#42407, ogx#6069: a developer's message, and vllm#41114, dify#39275,
    mastra#15764: system messages at any place."""
    chat = CHATS[name]
    reason = REFUSED.get((family, name))
    if reason is not None:
        with pytest.raises(InvalidArgument, match=reason) as caught:
            render(family, chat_of(*chat))
        assert caught.value.subject.startswith("chat")
        return
    text = render(family, chat_of(*chat))
    for role, content in chat:
        if role != "assistant" and content != "/no_think":
            assert content.strip() in text
    assert "/no_think" in text or name != "flag"


@pytest.mark.parametrize(
    ("family", "chat", "expected"),
    [
        ("chatml", "developer", "<|im_start|>system\n never apologise\n<|im_end|>"),
        (
            "developer",
            "developer",
            "<|start|>developer<|message|># Instructions\n\n never apologise",
        ),
        ("tools' developer", "developer", "<|System|> never apologise\n<|User|>hi"),
        ("chatml", "two system", "<|im_start|>system\nno<|im_end|>"),
        ("gemma3", "two system", "user\nOnly say BANANA.\n\nno\n\nhi<end_of_turn>"),
        ("last system", "both", "<s>Only say BANANA.\n\n never apologise\n<|User|>hi"),
        ("developer", "both", "# Instructions\n\nOnly say BANANA.\n\n never apologise\n<|end|>"),
        ("flags", "flag", "system\n/no_think: <|im_end|>"),
        ("thinking", "turns", "<|im_start|>assistant\nhello<|im_end|>"),
    ],
)
def test_system_messages_keep_their_places_where_the_template_lets_them(
    family: str, chat: str, expected: str
) -> None:
    assert expected in render(family, chat_of(*CHATS[chat]))


@pytest.mark.parametrize("role", ["banana", "function", "Assistant", " user", "im_start", ""])
def test_unknown_roles_are_refused_by_name(role: str) -> None:
    """sglang#40082, vllm#42407: also where the template would write any role."""
    with pytest.raises(InvalidArgument, match=f"does not know the role {role!r}") as caught:
        render("chatml", chat_of(USER, (role, "hello")))
    assert caught.value.subject == "chat.messages[1].role"
    assert caught.value.message.startswith("messages[1].role: ")


def test_roles_that_the_template_names_are_its_own() -> None:
    assert "<tool_response>42<" in render("thinking", chat_of(USER, ("tool", "42")))
    assert "<|im_start|>tool\n42<" in render("chatml", chat_of(USER, ("tool", "42")))
    with pytest.raises(InvalidArgument, match="role 'tool_response'"):
        render("thinking", chat_of(("tool_response", "42")))
    names = "{{ {'human': 'H', 'gpt': 'A'}[m.role] }}: {{ m.content }}"
    template = ChatTemplate("{% for m in messages %}" + names + "{% endfor %}", {})
    assert template.render(chat_of(("human", "hi"), ("gpt", "a")), 100, 1.0) == "H: hiA: a"


@pytest.mark.parametrize("content", ["Only say BANANA. ", "no", "a\nb"])
def test_a_part_of_a_text_is_not_left_out(content: str) -> None:
    """Short texts are found by more than their letters, which others have, too."""
    user = ("user", "I know no bananas, and a\nb")
    for cut in ("[:2]", "[1:]", "[:0]"):
        source = "{{ messages[0].content" + cut + " + messages[1].content }}"
        with pytest.raises(InvalidArgument, match=r"messages\[0\]\.content"):
            ChatTemplate(source, {}).render(chat_of(("system", content), user), 1000, 1.0)
    for change in ("| upper", "| replace('\n', ' ')", "| tojson", "| trim", "| indent(4)"):
        source = "{{ messages[0].content " + change + " }}{{ messages[1].content }}"
        assert ChatTemplate(source, {}).render(chat_of(("system", content), user), 1000, 1.0)


@pytest.mark.parametrize("content", ["Once upon", " Once upon ", "a", "", "<think>b</think>c\n"])
@pytest.mark.parametrize("family", FAMILIES)
def test_final_message_is_continued_as_transformers_does(
    family: str, content: str, tmp_path: Path
) -> None:
    """sglang#3417: the prompt ends within the assistant's message."""
    messages = (USER, ("assistant", content))
    theirs = AutoTokenizer.from_pretrained(
        str(save_tokenizer(byte_level(), tmp_path, FAMILIES[family]))
    ).apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        continue_final_message=True,
        tokenize=False,
    )
    ours = render(family, chat_of(*messages, continues=True))
    assert ours == theirs
    assert ours.rstrip().endswith(content.strip())
    assert len(render(family, chat_of(*messages))) > len(ours)


def test_final_message_is_not_lost() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidArgument, match="leaves this assistant message out") as caught:
        template.render(chat_of(USER, ("assistant", "a"), continues=True), 100, 1.0)
    assert caught.value.subject == "chat.messages[1].content"


@pytest.mark.processes
def test_adapters_templates_have_the_same_rules() -> None:
    processes = TemplateProcesses()

    def of_child(family: str, chat: Chat) -> str:
        return processes.render({**FAMILIES, **TOOLED}[family], SPECIALS, chat, 10_000, 5.0)

    try:
        for name, chat in CHATS.items():
            if ("llama2", name) not in REFUSED:
                assert of_child("llama2", chat_of(*chat)) == render("llama2", chat_of(*chat))
        whole = replace(HISTORY, tools=(TOOL,), variables={"enable_thinking": False})
        assert of_child("qwen3", whole) == render("qwen3", whole)
        final = chat_of(USER, ANSWER, continues=True)
        assert of_child("gemma3", final) == render("gemma3", final)
        for chat in (CHATS["late system"], (("banana", "a"),)):
            with pytest.raises(InvalidArgument) as ours:
                render("llama2", chat_of(*chat))
            with pytest.raises(InvalidArgument) as caught:
                of_child("llama2", chat_of(*chat))
            assert (caught.value.subject, caught.value.message) == (
                ours.value.subject,
                ours.value.message,
            )
    finally:
        processes.close()


def test_chats_of_many_messages_are_checked_in_time() -> None:
    """Messages that a template changes, or writes in another order, are looked for in one pass."""
    messages = [("user", f"{index} a longer text\nof two lines") for index in range(8000)]
    source = "{% for m in messages | reverse %}{{ m.content.replace('\n', ' ') }}{% endfor %}"
    assert ChatTemplate(source, {}).render(chat_of(*messages), 1 << 20, 5.0)


WEATHER = ToolCall("weather", '{"city": "Bern", "days": [1, 2]}', "abcdefghi")
ASKED = ChatMessage("user", "rain?")
CALLED = ChatMessage("assistant", "", "I look", (WEATHER,))
RESULT = ChatMessage("tool", "12 degrees", tool_call_id="abcdefghi", name="weather")
HISTORY = Chat((ASKED, CALLED, RESULT))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen3",
            '<think>\nI look\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": '
            '{"city": "Bern", "days": [1, 2]}}\n</tool_call>\n<|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n12 degrees\n</tool_response><|im_end|>",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}, '
            '"id": "abcdefghi"}]</s>[TOOL_RESULTS] {"content": 12 degrees, "call_id": "abcdefghi"}',
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>I look<|end|><|start|>assistant to=functions.weather"
            '<|channel|>commentary json<|message|>{"city": "Bern", "days": [1, 2]}<|call|>'
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>12 degrees",
        ),
    ],
)
def test_calls_results_and_thoughts_of_a_history_are_in_the_prompt(
    family: str, expected: str
) -> None:
    """vllm#10463: `reasoning_content` comes back, and templates call it by three names."""
    assert expected in render(family, HISTORY)


def test_thoughts_are_left_out_where_the_template_has_no_place_for_them() -> None:
    said = replace(CALLED, content="let me see")
    assert "I look" not in render("harmony", Chat((ASKED, said, RESULT)))
    answered = ChatMessage("assistant", "yes", "I look")
    assert "I look" not in render("chatml", Chat((ASKED, answered, ASKED)))


CLOCK = ToolCall("clock", "", "call_2")
BOTH_CALLED = ChatMessage("assistant", "I look", "", (replace(WEATHER, call_id="call_1"), CLOCK))
NOON = ChatMessage("tool", "noon", tool_call_id="call_2")
RAIN = ChatMessage("tool", "rain", tool_call_id="call_1")


@pytest.mark.parametrize(
    ("family", "in_order"),
    [
        # It refuses two calls in a message.
        ("llama3.1", ('"weather"', '"rain"', '"clock", "parameters": {}', '"noon"', "yes")),
        # It shows only the first call of a message, and needs the names of results.
        ("harmony", ("to=functions.weather<", "rain", "to=functions.clock<", "noon", "yes")),
        # It refuses other ids than its own.
        ("mistral", ('"id": "', '"clock"', '"id": "', "noon", "rain", "yes")),
        ("qwen3", ('"weather"', '"clock", "arguments": {}', "noon", "rain", "yes")),
    ],
)
def test_several_calls_in_a_message_are_shown(family: str, in_order: tuple[str, ...]) -> None:
    """Histories of frameworks, with their own ids, and results in any order: vllm#9451,
    vllm#9019, opencode#1680."""
    messages = (ASKED, BOTH_CALLED, NOON, RAIN, ChatMessage("assistant", "yes"), ASKED)
    text = render(family, Chat(tuple(with_names(messages))))
    place = text.index(in_order[0])
    for each in in_order[1:]:
        place = text.index(each, place + 1)


def test_ids_of_calls_and_of_their_results_are_the_same() -> None:
    text = render("mistral", Chat((ASKED, BOTH_CALLED, RAIN, NOON)))
    called = re.findall(r'"id": "([a-z0-9]{9})"', text)
    assert re.findall(r'"call_id": "([a-z0-9]{9})"', text) == called
    assert len(set(called)) == 2
    assert '"id": "abcdefghi"' in render("mistral", HISTORY)


def test_results_without_ids_follow_their_calls() -> None:
    called = replace(
        BOTH_CALLED, tool_calls=(replace(WEATHER, call_id=""), replace(CLOCK, call_id=""))
    )
    results = tuple(ChatMessage("tool", text) for text in ("rain", "noon", "more"))
    text = render("llama3.1", Chat((ASKED, called, *results, ASKED)))
    found = re.findall(r'"weather"|"rain"|"clock"|"noon"|"more"|hi', text)
    assert found == ['"weather"', '"rain"', '"clock"', '"noon"', '"more"']


@pytest.mark.slow
def test_a_history_of_many_calls_is_rendered_in_time() -> None:
    ids = [f"call_{index}" for index in range(5000)]
    called = ChatMessage("assistant", "", "", tuple(ToolCall("clock", "{}", each) for each in ids))
    results = [ChatMessage("tool", "noon", tool_call_id=each) for each in reversed(ids)]
    chat = Chat((ASKED, called, *results, ASKED))
    text = ChatTemplate(TOOLED["llama3.1"], {}).render(chat, 1 << 21, 5.0)
    assert text.count('"clock"') == text.count('"noon"') == 5000


def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    for arguments in ('{"city": "Be', "[1]", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000):
        history = Chat((ASKED, replace(CALLED, tool_calls=(ToolCall("weather", arguments),))))
        text = ChatTemplate(TOOLED["qwen3"], {}).render(history, 1 << 20, 5.0)
        assert f'"arguments": {arguments}}}\n</tool_call>' in text


def test_arguments_that_are_no_object_are_one_entry_where_templates_want_an_object() -> None:
    """GLM, Qwen3-Coder: a call that max_tokens has cut goes back into the history."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }};{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    for arguments, expected in (
        ('{"city": "Be', 'arguments={"city": "Be;'),
        ("\ud800", "arguments=?;"),
        ('{"city": 1}', "city=1;"),
    ):
        history = Chat((ASKED, replace(CALLED, tool_calls=(ToolCall("weather", arguments),))))
        assert ChatTemplate(source, {}).render(history, 1000, 1.0).endswith(expected)


def test_calls_that_the_template_would_drop_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="shows no calls of tools") as caught:
        render("chatml", HISTORY)
    assert caught.value.subject == "chat.messages[1].tool_calls"


def test_arguments_of_the_template() -> None:
    def of(family: str, variables: dict[str, Any], effort: str = "") -> str:
        chat = Chat((ASKED,), variables=variables, reasoning_effort=effort)
        return render(family, chat)

    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert of("qwen3", {"enable_thinking": False}).endswith(closed)
    assert of("qwen3", {}, "none").endswith(closed)
    assert not of("qwen3", {}, "low").endswith(closed)
    assert of("qwen3", {"enable_thinking": False}, "high").endswith(closed)
    assert "Reasoning: high" in of("harmony", {}, "high")
    # What a template sets where it is not given is an argument, too: Llama 3.
    source = "{% if not date is defined %}{% set date = '1 May' %}{% endif %}{{ date }}"
    chat = Chat((), variables={"date": "2 May"})
    assert ChatTemplate(source, {}).render(chat, 100, 1.0) == "2 May"


@pytest.mark.parametrize(
    ("family", "fields", "field", "reason"),
    [
        ("chatml", {"reasoning_effort": "low"}, "reasoning_effort", "reads neither it nor"),
        ("qwen3", {"variables": {"enable_thought": 1}}, "chat_template_kwargs", "no argument"),
        *(
            ("qwen3", {"variables": {name: "x"}}, "chat_template_kwargs", "set by this server")
            for name in ("messages", "tools", "bos_token", "raise_exception", "range")
        ),
    ],
)
def test_arguments_that_have_no_effect_are_refused(
    family: str, fields: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        render(family, Chat((ASKED,), **fields))
    assert caught.value.subject == f"chat.{field}"
    assert caught.value.message.startswith(f"{field}: ")


TOOL = Tool("weather", "of a city", '{"properties": {"city": {"type": "string"}}}')


@pytest.mark.parametrize("family", TOOLED)
def test_tools_are_in_the_prompt(family: str) -> None:
    text = render(family, replace(HISTORY, messages=(ASKED,), tools=(TOOL,)))
    assert '{"city": {"type": "string"}}' in text
    assert "weather" in text


def test_tools_that_the_template_leaves_out_are_refused() -> None:
    chat = Chat((ASKED,), tools=(TOOL, replace(TOOL, name="clock")))
    with pytest.raises(InvalidArgument, match="shows no tools") as caught:
        render("chatml", chat)
    assert caught.value.subject == "chat.tools"
    source = "{{ tools[0].function.name }}{{ messages[0].content }}"
    with pytest.raises(InvalidArgument, match="leaves this tool out") as caught:
        ChatTemplate(source, {}).render(chat, 1000, 1.0)
    assert caught.value.subject == "chat.tools[1]"
    defined = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | tojson }}"
    assert "clock" in ChatTemplate(defined, {}).render(replace(chat, messages=()), 1000, 1.0)


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    """Command R: the one called tool_use is for conversations with tools."""
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }} {{ messages[0].content }}"},
    ]
    folder = save_tokenizer(byte_level(), tmp_path, templates)
    template = Tokenizer(folder).template
    assert template is not None
    assert template.render(Chat((ASKED,)), 1000, 1.0) == "rain?"
    assert template.render(Chat((ASKED,), tools=(TOOL,)), 1000, 1.0) == "weather rain?"


def test_results_are_not_left_out() -> None:
    source = "{{ messages[0].content }}{% if messages[1].tool_calls %}{% endif %}"
    with pytest.raises(InvalidArgument, match="leaves this tool message out") as caught:
        ChatTemplate(source, {}).render(HISTORY, 1000, 1.0)
    assert caught.value.subject == "chat.messages[2].content"
