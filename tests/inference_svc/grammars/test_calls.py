"""Calls of tools as grammars: the texts that a family writes are possible, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from inference_svc.grammars import compiling
from inference_svc.grammars.calls import to_source
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import make_vocabulary
from inference_svc.text.answers.families import PARSERS, THOUGHTS, AnswerSyntax
from inference_svc.text.answers.forced import Cutter, ForcedCalls, can_force
from inference_svc.text.answers.harmony import THOUGHTS as HARMONY_THOUGHTS
from inference_svc.text.chat import Tool
from inference_svc.text.pieces import Piece

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TOOLS = (Tool("f", "", SCHEMA), Tool("g"))
FORCED = sorted(name for name, each in PARSERS.items() if each.frame is not None)


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
        calls = ForcedCalls(syntax, TOOLS, pieces.id_of)
        max_calls = options.get("max_calls", 0)
        of_calls = Grammar.calls(
            to_source(calls.begin, calls.separator, calls.end, calls.forms, max_calls)
        )
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
@pytest.mark.parametrize("family", FORCED)
def test_only_calls_that_match_their_schemas_are_possible(family: str, is_special: bool) -> None:
    syntax = PARSERS[family]
    frame = syntax.frame
    assert frame is not None
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
    several = bool(frame.separator)
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
    assert syntax.frame is not None
    form = syntax.form(TOOLS[0])
    call = f'{syntax.frame.begin}{form.begin}{{"a": 1}}{form.end}{syntax.frame.end}'
    before = f"{thoughts.begin}hm{thoughts.end}{syntax.next_begin}"
    texts = ['{"b": 2}', call, f'{before}{syntax.text_begin}{{"b": 2}}', f"{before}{call}"]
    texts += ['{"b": 3}', call.replace("1", '"1"'), f'{call}{{"b": 2}}']
    other = Grammar.json_schema({"enum": [{"b": 2}]})
    possible = accepts(family, texts, is_special=is_special, form=other, calls=True)
    assert possible == [True] * 4 + [False] * 3


def test_syntaxes_whose_arguments_are_json_can_be_forced() -> None:
    assert {*PARSERS} - {*FORCED} == {"gemma", "function_gemma", "glm", "qwen_coder"}
    assert not can_force(AnswerSyntax())


def test_an_end_of_answers_is_no_part_of_a_call() -> None:
    calls = ForcedCalls(AnswerSyntax(PARSERS["harmony"]), TOOLS, lambda marker: None)
    assert [form[2] for form in calls.forms] == [[], []]
