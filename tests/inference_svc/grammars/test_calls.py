"""Calls of tools as grammars: the texts that a family writes are possible, and no others."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from inference_svc.grammars import compiling
from inference_svc.grammars.calls import Call, Calls, CallsOrForm
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import make_vocabulary
from inference_svc.text.answers.families import PARSERS, THOUGHTS, AnswerReader, AnswerSyntax
from inference_svc.text.answers.forced import Cutter, calls_of
from inference_svc.text.answers.harmony import THOUGHTS as HARMONY_THOUGHTS
from inference_svc.text.chat import Tool
from inference_svc.text.pieces import Piece
from tests.inference_svc.text.answers.written import WRITERS, read

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TOOLS = (Tool("f", "", SCHEMA), Tool("g"))
STYLED = sorted(name for name, each in PARSERS.items() if each.frame.arguments is not None)
AS_JSON = sorted({*PARSERS} - {*STYLED})


class Pieces:
    """Every byte is a token, and so are all `markers`, as special ones, from 256 on."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = tuple(dict.fromkeys(markers))

    def of(self, token_id: int) -> Piece:
        if token_id < 256:
            return Piece(chr(token_id), bytes((token_id,)), bytes((token_id,)))
        return Piece(self.markers[token_id - 256], b"", b"")

    def id_of(self, marker: str) -> int:
        if marker not in self.markers:
            raise KeyError(marker)
        return 256 + self.markers.index(marker)

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            marker = next((each for each in self.markers if text.startswith(each)), "")
            found += [self.id_of(marker)] if marker else text[0].encode()
            text = text[len(marker) or 1 :]
        return found


def accepts(family: str, texts: list[str], *, is_special: bool, **options: Any) -> list[bool]:
    """Returns whether each text is possible and complete."""
    thoughts = HARMONY_THOUGHTS if family == "harmony" else THOUGHTS[1]
    syntax = AnswerSyntax(PARSERS[family], thoughts)
    markers = (*syntax.specials(calls=True, thoughts=True), "<|start|>") if is_special else ()
    pieces = Pieces(tuple(each for each in markers if "analysis" not in each))
    form, has_calls = options.get("form"), options.get("calls", False)
    cutter = Cutter(syntax, pieces.id_of)
    if form is None or has_calls:
        max_calls = options.get("max_calls", 0)
        of_calls = Grammar.calls(calls_of(syntax, TOOLS, pieces.id_of, max_calls))
        text_begin = cutter.parts(syntax.text_begin) if syntax.text_begin else []
        form = of_calls if form is None else form.or_calls(of_calls, text_begin)
        after = syntax.after_thoughts()
    else:
        after = syntax.after_thoughts(is_text=True)
    thoughts_parts = cutter.thoughts(syntax, after, is_begun=options.get("starts_thinking", False))
    assert thoughts_parts is not None
    grammar = form.after(thoughts_parts)
    tokens = compiling.Tokens(make_vocabulary(pieces, 256 + len(pieces.markers), ()).packed)
    found = []
    for text in texts:
        matcher = compiling.compile_grammar(tokens, grammar.kind.value, grammar.source)
        is_possible = all(map(matcher.consume_token, pieces.encode(text)))
        found.append(is_possible and matcher.is_accepting())
    return found


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", AS_JSON)
def test_only_calls_that_match_their_schemas_are_possible(family: str, is_special: bool) -> None:
    syntax = PARSERS[family]
    frame = syntax.frame
    form = syntax.form(TOOLS[0])
    call, other = f'{form.begin}{{"a": 1}}{form.end}', f'{form.begin}{{"a": "1"}}{form.end}'
    thoughts = HARMONY_THOUGHTS if family == "harmony" else THOUGHTS[1]
    after = syntax.next_begin or "\n"
    texts = [
        f"{frame.begin}{call}{frame.end}",
        f"{thoughts.begin}hm <{thoughts.end}{after}{frame.begin}{call}{frame.end}",
        f"{frame.begin}{call}{frame.separator}{call}{frame.end}",
        f"{frame.begin}{other}{frame.end}",
        "yes",
        "",
        f"{thoughts.begin}hm{thoughts.end}{after}yes",
    ]
    several = frame.separator is not None
    possible = [True, True, several, False, False, False, False]
    assert accepts(family, texts, is_special=is_special) == possible
    single = accepts(family, texts, is_special=is_special, max_calls=1)
    assert single == [True, True, False, False, False, False, False]


def test_thoughts_that_the_prompt_has_begun_come_first() -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    texts = [call, f"hm</think>\n\n{call}", f"<think>hm</think>{call}"]
    assert accepts("hermes", texts, is_special=False, starts_thinking=True) == [False, True, True]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", ["hermes", "harmony"])
def test_every_form_may_come_after_thoughts(family: str, is_special: bool) -> None:
    thoughts = HARMONY_THOUGHTS if family == "harmony" else THOUGHTS[1]
    after = PARSERS[family].next_begin + PARSERS[family].text_begin or "\n\n"
    for form in (
        Grammar.json_schema({"enum": ["ab"]}),
        Grammar.regex('"[a]b"'),
        Grammar.choice(['"ab"', "}"]),
        Grammar.grammar('start: A "b\\""\nA: /"a/ // } not the end'),
        Grammar.grammar('root ::= "\\"a" b\nb ::= "b\\""'),
    ):
        texts = ['"ab"', f'{thoughts.begin}hm "{thoughts.end}{after}"ab"', f"{thoughts.begin}hm"]
        possible = accepts(family, texts, is_special=is_special, form=form)
        assert possible == [True, True, False], form
        begun = accepts(
            family,
            ['"ab"', f'hm{thoughts.end}{after}"ab"'],
            is_special=is_special,
            form=form,
            starts_thinking=True,
        )
        assert begun == [False, True], form


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", ["hermes", "harmony", "mistral"])
def test_calls_may_come_in_the_place_of_a_form(family: str, is_special: bool) -> None:
    thoughts = HARMONY_THOUGHTS if family == "harmony" else THOUGHTS[1]
    syntax = PARSERS[family]
    form = syntax.form(TOOLS[0])
    call = f'{syntax.frame.begin}{form.begin}{{"a": 1}}{form.end}{syntax.frame.end}'
    before = f"{thoughts.begin}hm{thoughts.end}{syntax.next_begin}"
    texts = ['{"b": 2}', call, f'{before}{syntax.text_begin}{{"b": 2}}', f"{before}{call}"]
    texts += ['{"b": 3}', call.replace("1", '"1"'), f'{call}{{"b": 2}}']
    other = Grammar.json_schema({"enum": [{"b": 2}]})
    possible = accepts(family, texts, is_special=is_special, form=other, calls=True)
    assert possible == [True] * 4 + [False] * 3


RICH = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome"]},
        "note": {"type": "string", "description": "any"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "code": {"type": "string", "pattern": "^([A-Z]{2}|x/y)$"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "at": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "kind": {"enum": [1, "one", None]},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["city"],
    "$defs": {
        "deep": {
            "type": "object",
            "properties": {"a": {"type": ["boolean", "string"]}, "b": {"$ref": "#/$defs/deep"}},
        }
    },
}
RICH_CASES: list[tuple[dict[str, Any], bool]] = [
    ({"city": "Bern"}, True),
    ({"city": "Oslo"}, False),
    ({}, False),
    ({"note": "x"}, False),
    ({"city": "Rome", "note": "a <b>\n, }", "days": 3}, True),
    ({"city": "Rome", "note": "", "tags": []}, True),
    ({"city": "Rome", "days": 0}, False),
    ({"city": "Rome", "short": "abc"}, True),
    ({"city": "Rome", "short": "abcd"}, False),
    ({"city": "Rome", "short": ""}, False),
    ({"city": "Rome", "code": "x/y"}, True),
    ({"city": "Rome", "code": "AB1"}, False),
    ({"city": "Rome", "tags": ["a", "b,]"], "at": None}, True),
    ({"city": "Rome", "tags": ["a", "b", "c"]}, False),
    ({"city": "Rome", "at": 1.5, "kind": 1, "deep": {"a": True, "b": {"b": {}}}}, True),
    ({"city": "Rome", "kind": None, "deep": {"a": "yes"}}, True),
    ({"city": "Rome", "kind": 2}, False),
    ({"city": "Rome", "deep": {"a": 1}}, False),
    ({"city": "Rome", "more": "x"}, False),
]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", STYLED)
def test_arguments_that_are_no_json_match_their_schemas(family: str, is_special: bool) -> None:
    tools = (Tool("f", "", json.dumps(RICH)), Tool("g"))
    syntax = AnswerSyntax(PARSERS[family])
    pieces = Pieces(syntax.specials(calls=True, thoughts=True) if is_special else ())
    grammar = Grammar.calls(calls_of(syntax, tools, pieces.id_of))
    tokens = compiling.Tokens(make_vocabulary(pieces, 256 + len(pieces.markers), ()).packed)
    start = compiling.compile_grammar(tokens, grammar.kind.value, grammar.source)
    for arguments, is_possible in RICH_CASES:
        calls = [("f", arguments), ("g", {})]
        text = WRITERS[family]("", "", calls).lstrip("\n")
        assert read(AnswerReader(syntax, tools), [text]).objects == calls
        matcher = start.deep_copy()
        found = all(map(matcher.consume_token, pieces.encode(text))) and matcher.is_accepting()
        assert found == is_possible, arguments


REFUSED = {
    '{"properties": {"a": {"type": "string", "format": "date"}}}': "format",
    '{"properties": {"a b": {}}}': "cannot write the property",
    '{"properties": {"a": false}}': "no value",
    '{"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}': "in a group",
    '{"required": ["a"]}': "is required, but no property",
    '{"properties": {"a": {"type": "string", "enum": 1}}}': "",
    '{"properties": {"a": {"type": "string", "maxLength": "a"}}}': "",
    '{"required": [[]]}': "",
    '{"anyOf": [{"required": []}]}': "anyOf",
    '{"patternProperties": {}}': "patternProperties",
}
REFUSED_QUOTED = {
    '{"properties": {"a": {"type": "array", "contains": {}}}}': "contains",
    '{"properties": {"a": {"$ref": "#/properties/a"}}}': "is not one to",
    '{"properties": {"a": {"$ref": "#/$defs/a"}}}': "does not exist",
    '{"properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}': "less than",
    '{"properties": {"a": {"enum": [[]]}}}': "must be a list of",
    '{"properties": {"a": {"type": "integer", "enum": ["a"]}}}': "no value of its type",
}


@pytest.mark.parametrize("family", STYLED)
def test_schemas_that_such_arguments_cannot_match_are_refused(family: str) -> None:
    syntax, pieces = AnswerSyntax(PARSERS[family]), Pieces(())
    tokens = compiling.Tokens(make_vocabulary(pieces, 256, ()).packed)
    for schema, reason in {**REFUSED, **(REFUSED_QUOTED if "gemma" in family else {})}.items():
        calls = calls_of(syntax, (Tool("g"), Tool("f", "", schema)), pieces.id_of)
        request = {"kind": "calls", "source": calls.to_source(), "max_seconds": 60}
        found = compiling.check(tokens, request)
        assert reason in found.get("error", "accepted") != "accepted", schema
        assert found["part"] == 1


def test_a_model_whose_calls_are_json_may_answer_json_too() -> None:
    """Even where both begin alike, and with any space between the parts."""
    call = '{"name": "f", "parameters": {"a": 1}}'
    names = {"type": "object", "properties": {"name": {"type": "string"}}}
    forms: list[tuple[Any, str, bool]] = [
        ({"enum": [{"b": 2}]}, '{"b": 2}', True),
        ({"type": "object"}, '{"name": "h", "parameters": {"a": "1"}}', True),
        ({**names, "additionalProperties": False}, '{"name": "fg"}', True),
        ({**names, "additionalProperties": False}, '{"name": "f", "b": 1}', False),
        ({"type": "array"}, '[{"name": "f"}]', True),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"enum": [{"name": "f"}]}}}, '{"name": "f"}', True),
    ]
    for schema, text, is_possible in forms:
        form = Grammar.json_schema(schema)
        texts = [text, call, call.replace(" ", ""), f"{call}; {call}", f"{text}; {call}"]
        possible = accepts("llama3", texts, is_special=True, form=form, calls=True)
        assert possible == [is_possible, True, True, True, False], schema
        once = accepts("llama3", texts, is_special=True, form=form, calls=True, max_calls=1)
        assert once == [is_possible, True, True, False, False], schema


APART: list[tuple[str, Grammar, bool]] = [
    ("hermes", Grammar.regex("[^<].*"), True),
    ("hermes", Grammar.regex(".+"), False),
    ("hermes", Grammar.regex("<b>"), False),
    ("hermes", Grammar.choice(["yes", "<no>"]), False),
    ("hermes", Grammar.choice(["yes", "no"]), True),
    ("hermes", Grammar.grammar('start: "yes" | /[0-9]+/'), True),
    ("hermes", Grammar.grammar('start: "<" "a"'), False),
    ("hermes", Grammar.json_schema({}), True),
    ("llama3", Grammar.json_schema({"type": "object"}), True),
    ("llama3", Grammar.regex(r"\{\}"), False),
    ("llama3", Grammar.regex("[0-9]+"), True),
    ("mistral", Grammar.json_schema({"type": "object"}), True),
    ("mistral", Grammar.json_schema({"type": "array"}), False),
]


@pytest.mark.parametrize("is_thought", [False, True])
@pytest.mark.parametrize(("family", "form", "is_apart"), APART)
def test_forms_whose_texts_may_begin_as_calls_are_refused(
    family: str, form: Grammar, is_apart: bool, is_thought: bool
) -> None:
    """A marker that is a special token is no part of a text, so that all forms go with it."""
    syntax = AnswerSyntax(PARSERS[family], THOUGHTS[1])
    for markers in ((), syntax.specials(calls=True, thoughts=True)):
        pieces = Pieces(markers)
        whole = form.or_calls(Grammar.calls(calls_of(syntax, TOOLS, pieces.id_of)), [])
        if is_thought:
            parts = Cutter(syntax, pieces.id_of).thoughts(syntax, "", is_begun=True)
            assert parts is not None
            whole = whole.after(parts)
        tokens = compiling.Tokens(make_vocabulary(pieces, 256 + len(pieces.markers), ()).packed)
        request = {"kind": whole.kind.value, "source": whole.source, "max_seconds": 60}
        found = compiling.check(tokens, request)
        assert ("error" not in found) == (is_apart or bool(markers and family != "llama3")), found
        if "error" in found:
            assert "leave the tools out" in found["error"]


@pytest.mark.parametrize(
    ("form", "is_apart"), [("い+", True), ("[^「]+", True), ("[^い]+", False), ("「い", False)]
)
def test_a_character_of_several_tokens_is_compared_as_a_whole(form: str, is_apart: bool) -> None:
    """Those of 「 and い begin with the same byte."""
    calls = Calls([Call(["「"], {"type": "object"}, ["」"])])
    either = CallsOrForm(calls.to_source(), [], "regex", form)
    tokens = compiling.Tokens(make_vocabulary(Pieces(()), 256, ()).packed)
    found = compiling.check(
        tokens, {"kind": "either", "source": either.to_source(), "max_seconds": 60}
    )
    assert ("error" not in found) == is_apart, found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of grammars that are compiled, and when their time begins and ends."""
    found: list[str] = []
    compiled, timed = compiling.compile_grammar, signal.setitimer

    def compile_grammar(tokens: compiling.Tokens, kind: str, source: str) -> Any:
        found.append(kind)
        return compiled(tokens, kind, source)

    def setitimer(which: int, seconds: float) -> tuple[float, float]:
        found.append("time" if seconds else "end")
        return timed(which, seconds)

    monkeypatch.setattr(compiling, "compile_grammar", compile_grammar)
    monkeypatch.setattr(signal, "setitimer", setitimer)
    return found


def test_a_form_next_to_calls_costs_no_more_than_is_needed(steps: list[str]) -> None:
    """A refusal of both compiles no call, and the form alone takes nothing of the whole's time."""

    def steps_of(family: str, form: Grammar, *markers: str) -> list[str]:
        syntax, pieces = AnswerSyntax(PARSERS[family]), Pieces(markers)
        whole = form.or_calls(Grammar.calls(calls_of(syntax, TOOLS, pieces.id_of)), [])
        tokens = compiling.Tokens(make_vocabulary(pieces, 256 + len(markers), ()).packed)
        steps.clear()
        compiling.check(tokens, {"kind": "either", "source": whole.source, "max_seconds": 60})
        return steps

    assert steps_of("hermes", Grammar.regex(".+")) == ["time", "regex", "end"]
    assert steps_of("hermes", Grammar.regex("a")) == ["time", "regex", "time", "either", "end"]
    once = ["time", "either", "end"]
    assert steps_of("hermes", Grammar.regex(".+"), "<tool_call>", "</tool_call>") == once
    assert steps_of("llama3", Grammar.json_object()) == once


def test_a_call_that_is_to_blame_is_looked_for_in_time(
    monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    monkeypatch.setattr(compiling, "PART_SECONDS", -1.0)  # the clock may stand still
    syntax, pieces = AnswerSyntax(PARSERS[STYLED[0]]), Pieces(())
    tokens = compiling.Tokens(make_vocabulary(pieces, 256, ()).packed)
    tools = (Tool("g"), Tool("f", "", '{"patternProperties": {}}'))
    calls = calls_of(syntax, tools, pieces.id_of)
    found = compiling.check(
        tokens, {"kind": "calls", "source": calls.to_source(), "max_seconds": 60}
    )
    assert "patternProperties" in found["error"]
    assert found["part"] is None
    assert steps.count("calls") == 1


def test_an_end_of_answers_is_no_part_of_a_call() -> None:
    calls = calls_of(AnswerSyntax(PARSERS["harmony"]), TOOLS, lambda marker: None)
    assert [call.end for call in calls.calls] == [[], []]
