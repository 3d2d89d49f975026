"""Each family's answers: what a reader finds, however the text is cut."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from inference_svc.config import InferenceSettings, ToolParser
from inference_svc.text.answers.families import PARSERS, AnswerSyntax
from tests.inference_svc.text.answers.written import (
    TOOLS,
    WRITERS,
    Call,
    Read,
    cut,
    read,
    reader_of,
)

# Neither markers nor text that begins one: what a writer does not escape, a model does not write.
PLAIN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters='<[|"{}:`'), max_size=40
).filter(lambda text: "Action" not in text and "functools" not in text)
SAID = PLAIN.map(str.strip)
STRINGS = st.one_of(PLAIN, st.sampled_from(["", "a{b}", 'say "hi"', "]}", "\\", "5", "null", "é✓"]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**15), 10**15), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3),
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": STRINGS,
        "count": st.integers(-(10**15), 10**15),
        "any": st.one_of(st.none(), st.booleans(), st.lists(VALUES, max_size=3)),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), max_size=3)


PLACES = st.lists(st.integers(0, 10**6), max_size=12)


@pytest.mark.hypothesis
@pytest.mark.parametrize("form", WRITERS)
def test_calls_are_read_however_the_text_is_cut(form: str) -> None:
    family = form.partition(" ")[0]

    @given(SAID, SAID, CALLS, PLACES)
    @example("I look", "hm", [("f", {"text": "a", "count": 1}), ("f", {})], [])
    def check(said: str, thoughts: str, calls: list[Call], places: list[int]) -> None:
        text = WRITERS[form](said, thoughts, calls)
        whole = read(reader_of(family), [text])
        assert (whole.text, whole.thoughts, whole.objects) == (said, thoughts, calls)
        assert not any(whole.errors)
        assert read(reader_of(family), cut(text, places)) == whole
        assert read(reader_of(family), [*text, ""]) == whole

    check()


FRAGMENTS = st.sampled_from(
    sorted(
        {
            *(marker for each in PARSERS.values() for marker in (*each.begins, *each.specials)),
            *("<think>", "</think>", '{"name": "f", "arguments": ', '{"name": ', '{"a": 1', "}"),
            *("[", "]", ",", ";", '"', "\\", "{", ":", " ", "\n", "x", "call:f{", "to=f", "<", "|"),
            *("<function=f>", "<parameter=a>", "</parameter>", "```", "<arg_key>k</arg_key>"),
        }
    )
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("family", PARSERS)
def test_any_text_is_read_the_same_however_it_is_cut(family: str) -> None:
    """And nothing of it is lost where it is no call."""

    @given(st.lists(FRAGMENTS, max_size=25).map("".join), PLACES, st.booleans())
    def check(text: str, places: list[int], starts_thinking: bool) -> None:
        whole = read(reader_of(family, starts_thinking=starts_thinking), [text])
        for texts in (cut(text, places), [*text, ""]):
            assert read(reader_of(family, starts_thinking=starts_thinking), texts) == whole
        for (_, arguments), error in zip(whole.calls, whole.errors, strict=True):
            assert error or isinstance(Read("", "", (("", arguments),)).objects[0][1], dict)
        plain = read(reader_of(family, tools=(), has_thoughts=False), [text])
        assert (plain.calls, plain.thoughts) == ((), "")

    check()


@pytest.mark.slow
@pytest.mark.parametrize("family", PARSERS)
def test_hostile_texts_take_time_in_proportion(family: str) -> None:
    syntax = PARSERS[family]
    begin = syntax.begins[0]
    for text in (
        begin * 10_000,
        begin + '{"name": "f", "arguments": ' + "[" * 50_000,
        begin + '[{"name": "f", "arguments": "' + "\\" * 50_000,
        (begin + '{"name": "f", "arguments": {}}') * 2_000,
        " " * 200_000 + "<" * 20_000,
        "<think>" + " \n" * 100_000,
    ):
        start_s = time.process_time()
        pieces = [text[i : i + 4096] for i in range(0, len(text), 4096)]
        read(reader_of(family), pieces)
        assert time.process_time() - start_s < 5  # in proportion it takes a twentieth of that


@pytest.mark.parametrize(
    ("arguments", "error", "written"),
    [
        ('{"a": 1,}', "no JSON", ""),
        ('{"a": 1', "no JSON", '{"a": 1\n'),
        ("{'a': 1}", "no JSON", ""),
        ('"{}"', "no object", ""),
        ("[1]", "no object", ""),
        ("null", "no object", ""),
        ('{"a": NaN}', "no JSON", ""),
        ('{"a": 1} x', "no JSON", '{"a": 1}x'),
        ("[" * 10_000 + "]" * 10_000, "nested too deeply", ""),
    ],
)
def test_arguments_that_are_no_object_are_said_to_be_so_and_not_mended(
    arguments: str, error: str, written: str
) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}\n</tool_call> more'
    found = read(reader_of("hermes"), [text])
    assert found.calls == (("f", written or arguments),)
    assert error in found.errors[0]
    assert found.text == "more"


@pytest.mark.parametrize("form", WRITERS)
def test_a_call_that_the_answer_ends_in_is_whole_or_has_an_error(form: str) -> None:
    family = form.partition(" ")[0]
    arguments = {"text": "ab", "count": 120}
    text = WRITERS[form]("", "", [("f", arguments)])
    num_errors = 0
    for end in range(len(text) + 1):
        found = read(reader_of(family), [text[:end]])
        assert not found.calls or (found.calls[0][0], found.text) == ("f", "")
        for (_, written), error in zip(found.calls, found.errors, strict=True):
            num_errors += bool(error)
            assert error or json.loads(written) == arguments, text[:end]
    assert num_errors
    assert read(reader_of(family), [WRITERS[form]("", "", [("f", {})])]).calls == (("f", "{}"),)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno call\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "f" * 300 + '"}</tool_call>',
        "<tool_call>",
        "a <tool_cal",
    ],
)
def test_text_that_is_no_call_stays_text(text: str) -> None:
    assert read(reader_of("hermes"), [text]) == Read(text, "", ())


def test_json_answers_are_calls_of_known_tools_only() -> None:
    answer = '{"name": "Ada", "parameters": {"born": 1815}}'
    assert read(reader_of("llama3"), [answer]).text == answer
    call = '{"name": "f", "parameters": {"text": "a"}}'
    assert read(reader_of("llama3"), [call]).calls == (("f", '{"text": "a"}'),)
    assert read(reader_of("llama3"), [f"x{call}"]).text == f"x{call}"


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"text": 1}, "name": "f"}</tool_call>', '{"text": 1}'),
        ("hermes", '<tool_call>{"id": "1", "name": "f"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"text": 1}</tool_call>', '{"text": 1}'),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "{}"),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"text": "a"}', '{"text": "a"}'),
        ("glm", "<tool_call>f</tool_call>", "{}"),
        (
            "glm",
            "<tool_call>f<arg_key>count</arg_key><arg_value>007</arg_value></tool_call>",
            '{"count": "007"}',
        ),
        ("gemma", "<|tool_call>call:f{a:true,b:word}<tool_call|>", '{"a":true,"b":"word"}'),
        (
            "harmony",
            ' to=functions.f<|channel|>commentary json<|message|>{"text": "a"}',
            '{"text": "a"}',
        ),
    ],
)
def test_other_forms_of_calls(family: str, text: str, expected: str) -> None:
    found = read(reader_of(family), [text])
    assert (found.text, found.calls, found.errors) == ("", (("f", expected),), ("",))


def test_text_before_the_end_of_a_call_is_no_argument() -> None:
    arguments = "<arg_key>text</arg_key>\n<arg_value>a</arg_value>"
    found = read(reader_of("glm"), [f"<tool_call>f\n{arguments}\n<</tool_call>"])
    assert [name for name, _ in found.calls] == ["f"]
    assert found.errors[0].startswith("the arguments are no JSON")


def test_calls_after_the_most_are_left_out() -> None:
    text = WRITERS["hermes"]("a", "", [("f", {}), ("f", {"text": "b"}), ("f", {})])
    found = read(reader_of("hermes", max_calls=1), [text])
    assert (found.text, found.calls) == ("a", (("f", "{}"),))


@pytest.mark.parametrize("family", sorted({*PARSERS} - {"harmony"}))
def test_an_answer_with_a_form_has_calls_first_or_none(family: str) -> None:
    """A text that has a form may have the texts of calls in it."""
    call = WRITERS[family]("", "", [("f", {"text": "rain"})])
    for before in ("", "<think>hm</think>\n\n"):
        for pieces in (1, 7, 10_000):
            texts = [before + call, f"{before}No: {call}"]
            found = [
                read(reader_of(family, has_form=True), _pieces(text, pieces)) for text in texts
            ]
            assert found[0].objects == [("f", {"text": "rain"})]
            assert (found[1].calls, found[1].text) == ((), f"No: {call}")


@pytest.mark.parametrize("family", sorted({*PARSERS} - {"harmony"}))
@pytest.mark.parametrize("starts_thinking", [False, True])
def test_calls_come_after_thoughts_that_are_a_part_of_the_text(
    family: str, starts_thinking: bool
) -> None:
    call = WRITERS[family]("", "", [("f", {"text": "rain"})])
    before = "hm</think>" if starts_thinking else "<think>hm</think>"
    for pieces in (1, 7, 10_000):
        found = [
            read(
                reader_of(
                    family, has_form=True, has_thoughts=False, starts_thinking=starts_thinking
                ),
                _pieces(text, pieces),
            )
            for text in (f"{before}\n\n{call}", f"{before}\n\nNo: {call}")
        ]
        assert (found[0].objects, found[0].text) == ([("f", {"text": "rain"})], before)
        assert (found[1].calls, found[1].text) == ((), f"{before}\n\nNo: {call}")
        assert found[0].thoughts == found[1].thoughts == ""


def _pieces(text: str, num_chars: int) -> list[str]:
    return [text[start : start + num_chars] for start in range(0, len(text), num_chars)]


def test_thoughts() -> None:
    def of(text: str, **options: Any) -> tuple[str, str]:
        found = read(reader_of("hermes", **options), [text])
        return found.thoughts, found.text

    assert of("<think>\nhm\n</think>\n\nyes") == ("hm", "yes")
    assert of("hm</think>yes", starts_thinking=True) == ("hm", "yes")
    assert of("hm", starts_thinking=True) == ("hm", "")
    assert of("<think>hm") == ("hm", "")
    assert of("<think>\n\n</think>\n\nyes") == ("", "yes")
    assert of("no <think>hm</think>") == ("", "no <think>hm</think>")
    assert of("<think>hm</think>yes", has_thoughts=False) == ("", "<think>hm</think>yes")
    assert of(" yes \n") == ("", " yes \n")


def test_messages_of_one_answer_are_apart() -> None:
    """gpt-oss: a text to the user, and thoughts, may come before the final text."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It rains."
    )
    empty = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for end in ("", empty, "<|end|><|start|>assistant<|chan"):
        found = read(reader_of("harmony"), [text + end])
        assert (found.thoughts, found.text) == ("hm\n\nso", "I look.\n\nIt rains.")


@pytest.mark.parametrize(
    ("template", "calls", "begin"),
    [
        ("<|im_start|>...<tool_call>\n<think></think>", "hermes", "<think>"),
        ("<tool_call><function=example>", "qwen_coder", None),
        ("<tool_call><arg_key><think></think>", "glm", "<think>"),
        ("<|python_tag|>", "llama3", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][THINK][/THINK]", "mistral", "[THINK]"),
        ("<start_function_call>call:", "function_gemma", None),
        ("<|tool_call>call:<|channel>thought<channel|>", "gemma", "<|channel>thought"),
        ("<|channel|>final<|message|>", "harmony", "<|channel|>analysis<|message|>"),
        ("<|tool|>", "phi", None),
        ("<|start_of_role|><|tool_call|>", "granite", None),
        ("<|start_of_role|><tool_call>", "hermes", None),
        ("<|START_ACTION|><|START_THINKING|><|END_THINKING|>", "command_r", "<|START_THINKING|>"),
        ("{{ messages[0].content }}", None, None),
    ],
)
def test_syntaxes_are_seen_in_templates(
    template: str, calls: str | None, begin: str | None
) -> None:
    found = AnswerSyntax.of(template)
    assert (found.calls and found.calls.name) == calls
    assert (found.thoughts and found.thoughts.begin) == begin
    chosen = AnswerSyntax.of(template, "mistral").calls
    assert chosen is not None
    assert chosen.name == "mistral"
    assert AnswerSyntax.of(template, "none").calls is None


def test_prompts_begin_thoughts() -> None:
    syntax = AnswerSyntax.of("<think></think>")
    assert syntax.begins_thoughts("a<think>\n")
    assert not syntax.begins_thoughts("<think>\n\n</think>\n\n")
    assert not syntax.begins_thoughts("write <think> first<|assistant|>")
    assert not AnswerSyntax().begins_thoughts("<think>")
    assert syntax.is_thinking("<think>hm")
    assert not syntax.is_thinking("<think>hm</think>yes")
    assert not syntax.is_thinking("yes <think>")


def test_every_parser_can_be_chosen() -> None:
    assert {*PARSERS, "auto", "none"} == {*get_args(ToolParser)}
    with pytest.raises(ValidationError, match="tool_parser"):
        InferenceSettings(tool_parser="claude")
