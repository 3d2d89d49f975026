"""Checks of grammars: good ones, ones that are refused, and hostile ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference_svc.errors import GrammarRefused
from inference_svc.grammars import checks, compiling
from inference_svc.grammars.checks import CheckProcesses, GrammarChecks
from inference_svc.grammars.grammar import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, Grammar
from inference_svc.grammars.lanes import rows
from inference_svc.grammars.schema_places import without_idle
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.work_budget import WorkBudget
from tests.inference_svc.grammars.alphabet import END, SPECIAL, vocabulary
from tests.support.wait import until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def processes() -> Iterator[CheckProcesses]:
    made = CheckProcesses(vocabulary)
    yield made
    made.close()


def test_sources_are_bounded() -> None:
    large = "x" * (MAX_GRAMMAR_BYTES + 1)
    for make in (Grammar.json_schema, Grammar.regex, Grammar.grammar):
        with pytest.raises(InvalidArgument, match=r"the\.field has 262145 bytes; at most 262144"):
            make(large, "the.field")
        with pytest.raises(InvalidArgument, match=r"the\.field must not be empty"):
            make(" ", "the.field")
    with pytest.raises(InvalidArgument, match="at most 262144"):
        Grammar.choice(["ab" * MAX_GRAMMAR_BYTES], "the.field")
    with pytest.raises(InvalidArgument, match="at most 4096 choices"):
        Grammar.choice(["a"] * (MAX_CHOICE_TEXTS + 1), "the.field")
    for choices in ([], ["a", ""]):
        with pytest.raises(InvalidArgument, match="must have choices, none of them empty"):
            Grammar.choice(choices, "the.field")


GOOD = (
    Grammar.json_object(),
    Grammar.json_schema(True),
    Grammar.json_schema('{"type": "string", "pattern": "^[a-z]+$"}'),
    Grammar.regex("[a-z/]+\\d"),
    Grammar.regex("a\\\\"),
    Grammar.choice(['a"', "b\n\\", "日"]),
    # Zod writes propertyNames for each record.
    Grammar.json_schema({"items": {"propertyNames": {"type": "string"}}, "uniqueItems": False}),
    Grammar.json_schema({"properties": {"uniqueItems": {"unevaluatedProperties": True}}}),
    Grammar.grammar('start: "a" B\nB: /[b-d]+/'),
    Grammar.grammar("start: <|call|> %json {}"),
    Grammar.grammar('root ::= "a" | "b" root'),
    Grammar.grammar('start: "temperature = " T // temperature=1\nT: /x-guidance: \\/temperature=/'),
)


def test_good_grammars_are_accepted(processes: CheckProcesses) -> None:
    for each in GOOD:
        verdict, _ = processes.check(each)
        assert verdict.error == "", each


REF = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"items": [{"not": {}}]}}}
REFUSED: list[tuple[Grammar, str]] = [
    (
        Grammar.json_schema({"properties": {"a": {"items": {"type": "b"}}}}),
        ": $.properties.a.items: Invalid type: b",
    ),
    (Grammar.json_schema({"anyOf": [{}, {"not": {}}]}), ": $.anyOf[1]: Unimplemented"),
    (Grammar.json_schema(REF), ": $.$defs.b.items[0]: Unimplemented"),
    (Grammar.json_schema({"uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
    (Grammar.json_schema({"not": {}}), "Unimplemented keys"),
    (Grammar.json_schema({"propertyNames": {"pattern": "a"}}), "Unimplemented keys"),
    (
        Grammar.json_schema({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}),
        "$.items: parts of a oneOf may overlap: use anyOf",
    ),
    (Grammar.json_schema(False), "it must be a JSON object"),
    (Grammar.json_schema("[]"), "it must be a JSON object"),
    (Grammar.json_schema("{"), "it is no JSON"),
    (Grammar.json_schema({"type": "banana"}), "banana"),
    (Grammar.json_schema({"$ref": "http://other/schema"}), "http://other/schema"),
    (Grammar.json_schema({"$ref": "#"}), "no text has this form"),
    (Grammar.json_schema({"x-guidance": {"lenient": True}}), "x-guidance is not supported"),
    (Grammar.regex("("), "unclosed group"),
    (Grammar.regex("a(?=b)"), "look-around"),
    (Grammar.regex("[^\\s\\S]"), "no text has this form"),
    (Grammar.regex("a\\"), "ends in a backslash"),
    (Grammar.regex("\ud800"), "half of a surrogate pair"),
    (Grammar.grammar('start: "\ud800"'), "half of a surrogate pair"),
    (Grammar.json_schema('{"const": NaN}'), "it is no JSON: it has NaN"),
    (Grammar.grammar("start: other"), "other"),
    (Grammar.grammar("start: <|banana|>"), "unknown special token"),
    (Grammar.grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance is not"),
    (Grammar.grammar('start[temperature=0.5]: "a"'), "temperature is not supported"),
    (Grammar.grammar("start: @other"), "unknown grammar"),
    (Grammar.grammar('start: %json {"x\\u002dguidance": {}}'), "x-guidance is not supported"),
    (Grammar.grammar('root ::= "a'), "it is no EBNF"),
]


def test_grammars_are_refused_by_name(processes: CheckProcesses) -> None:
    for grammar, words in REFUSED:
        verdict, _ = processes.check(grammar)
        assert words in verdict.error, (grammar, verdict)
        assert len(verdict.error) < 500


def test_keywords_that_forbid_nothing_are_left_out() -> None:
    names = {"propertyNames": {"type": "string"}, "unevaluatedItems": {}}
    kept = {"properties": {"uniqueItems": {}}, "uniqueItems": True, "const": names}
    inner = [{"not": {**kept, **names}}, True]
    assert without_idle({**names, "anyOf": inner}) == {"anyOf": [{"not": kept}, True]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def loop(length: int) -> dict[str, Any]:
    names = [f"d{index}" for index in range(length)]
    following = [*names[1:], names[0]]
    loops = {a: {"$ref": f"#/$defs/{b}"} for a, b in zip(names, following, strict=True)}
    return {"$defs": loops, "$ref": "#/$defs/d0"}


def test_a_deep_schema_is_refused_in_plain_words(processes: CheckProcesses) -> None:
    source = '{"items":' * 600 + "{}" + "}" * 600
    verdict, _ = processes.check(Grammar.json_schema(source))
    assert verdict.error.endswith("it is nested too deeply")


MANY = {f"p{index}": {"type": "string"} for index in range(4000)}
HOSTILE = {
    "depth": Grammar.json_schema("[" * 100_000),
    "depth of objects": Grammar.json_schema('{"items":' * 20_000),
    "depth within limits": Grammar.json_schema(nested(60)),
    "reference loop": Grammar.json_schema(loop(1000)),
    "states": Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
    "properties": Grammar.json_schema({"properties": MANY, "additionalProperties": False}),
    "enum": Grammar.json_schema({"enum": [f"value {index}" for index in range(15_000)]}),
    "length": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "items": Grammar.json_schema({"type": "array", "items": {}, "minItems": 10**9}),
    "numbers": Grammar.json_schema({"type": "number", "minimum": -(10**300), "maximum": 1e308}),
    "repetition": Grammar.regex("((a{1,1000}){1,1000}){1,1000}"),
    "exponential": Grammar.regex("(a|b)*a(a|b){500}c"),
    "intersection": Grammar.grammar("start: A\nA: /(a|b)*a(a|b){30}/ & /(a|b)*b(a|b){29}/"),
    "ambiguity": Grammar.grammar('start: x\nx: x x x | x x | "a" | "b"'),
    "many terminals": Grammar.grammar(
        f"start: {' | '.join(f'T{i}' for i in range(2000))}\n"
        + "\n".join(f"T{i}: /[a-z]*x{i}[a-z]*/" for i in range(2000))
    ),
    "surrogate": Grammar.json_schema('{"enum": ["\\ud800"]}'),
    "lone surrogate": Grammar.choice(["\ud800"]),
    "unicode": Grammar.regex("[\U0001f600-\U0001f64f]{1,5000}\\p{L}*"),
}


def test_hostile_grammars_are_refused(processes: CheckProcesses) -> None:
    """Or accepted as slow: no check takes long, and none harms the next one."""
    verdicts = {}
    for name, grammar in HOSTILE.items():
        began_s = time.monotonic()
        verdict, _ = processes.check(grammar)
        verdicts[name] = verdict
        assert time.monotonic() - began_s < checks.TASK.limits.wall_seconds, name
        assert processes.check(GOOD[0])[0].error == ""
    costly = [name for name, each in verdicts.items() if "more than 1 s" in each.error]
    assert "states" in costly
    assert {"depth", "reference loop", "numbers", "surrogate"} <= {
        name for name, each in verdicts.items() if each.error
    }


def test_verdicts_are_remembered_by_tenant() -> None:
    """Once a tenant's grammar is checked, no process is asked again, also for a refused one."""

    async def run() -> None:
        made = GrammarChecks(vocabulary, WorkBudget("grammars", share=1.0))

        def count(*key: str) -> float:
            return {(each.key, *each.labels): each.value for each in made.samples()}[key]

        with ThreadPoolExecutor(2) as threads:
            good = [made.check(Grammar.regex("a+", "f"), "t", "t", threads) for _ in range(3)]
            assert [each.source for each in await asyncio.gather(*good)] == ["a+"] * 3
            assert made.num_verdicts("t") == 1, "checked once, while others wait for that"
            for _ in range(2):
                words = r"^the\.field: .*unclosed group"
                with pytest.raises(GrammarRefused, match=words) as caught:
                    await made.check(Grammar.regex("(", "the.field"), "t", "t", threads)
                assert caught.value.subject == "the.field"
            assert count("grammar_check_hits") == 1
            await made.check(Grammar.regex("a+", "f"), "other", "other", threads)
            assert count("grammar_check_hits") == 1, "no tenant finds out what others use"
            await made.check(Grammar.regex("a+", "f"), "other", "other", threads)
            assert count("grammar_check_hits") == 2
        assert count("structured_requests", "accepted") == 5
        assert count("structured_requests", "refused") == 2
        made.close()

    asyncio.run(run())


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that has more than others loses its own."""
    monkeypatch.setattr(checks, "TENANT_VERDICTS", 3)
    monkeypatch.setattr(checks, "MAX_VERDICTS", 4)

    async def run() -> None:
        made = GrammarChecks(vocabulary, WorkBudget("grammars", share=1.0))
        with ThreadPoolExecutor(1) as threads:
            for tenant, count in (("a", 5), ("b", 1), ("c", 1)):
                for index in range(count):
                    await made.check(Grammar.regex("a" * (index + 1)), tenant, tenant, threads)
        assert {tenant: made.num_verdicts(tenant) for tenant in "abc"} == {"a": 2, "b": 1, "c": 1}
        made.close()

    asyncio.run(run())


def test_a_grammar_is_checked_once_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by callers that have waited for their account's turn, and by two accounts."""
    monkeypatch.setattr(checks, "MAX_VERDICTS", 4)

    async def run() -> None:
        made = GrammarChecks(vocabulary, WorkBudget("grammars", share=0.5))
        first, second = Grammar.regex("a+"), Grammar.regex("b+")
        with ThreadPoolExecutor(4) as threads:
            asked = [(first, "x"), *[(second, "x"), (second, "y")] * 5]
            await asyncio.gather(*(made.check(each, "t", by, threads) for each, by in asked))
            assert made.num_verdicts("t") == 2
            for tenant in "abcdef":
                await made.check(first, tenant, tenant, threads)
        assert [made.num_verdicts(each) for each in "tabcdef"] == [0, 0, 0, 1, 1, 1, 1]
        made.close()

    asyncio.run(run())


def test_a_machines_faults_are_no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that others end, or that takes long on a busy machine, can be tried again."""

    async def run() -> None:
        work = WorkBudget("grammars", share=1.0)
        made = GrammarChecks(vocabulary, work)
        limits = dataclasses.replace(checks.TASK.limits, wall_seconds=0.0)
        with monkeypatch.context() as busy:
            busy.setattr(checks, "TASK", dataclasses.replace(checks.TASK, limits=limits))
            hurried = GrammarChecks(vocabulary, work)
        grammar = Grammar.regex("a+", "the.field")
        with ThreadPoolExecutor(1) as threads:
            with monkeypatch.context() as without:
                without.setattr(sys, "executable", "/no/python")
                with pytest.raises(Unavailable, match=r"^the\.field: .* try again") as caught:
                    await made.check(grammar, "t", "t", threads)
                assert caught.value.retry_after_s > 0
            with pytest.raises(Unavailable):
                await hurried.check(grammar, "t", "t", threads)
            assert made.num_verdicts("t") == hurried.num_verdicts("t") == 0
            assert await made.check(grammar, "t", "t", threads)
        made.close()
        hurried.close()

    asyncio.run(run())


def test_a_check_that_is_killed_is_no_verdict(processes: CheckProcesses) -> None:
    """As by a system without memory."""
    with ThreadPoolExecutor(1) as threads:
        assert processes.check(GOOD[0])[0].error == ""
        [process] = processes.pool.idle
        os.kill(process.pid, signal.SIGSTOP)
        found = threads.submit(processes.check, GOOD[0])
        until(lambda: not processes.pool.idle, 60)
        os.kill(process.pid, signal.SIGKILL)
        verdict, _ = found.result(60)
    assert not verdict.is_final
    assert processes.check(GOOD[0])[0].error == ""


def test_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TENANT_TEMPLATES", 2)
    monkeypatch.setattr(rows, "MAX_TEMPLATES", 3)
    monkeypatch.setattr(rows, "TENANT_TEMPLATE_CHARS", 100)
    matcher = compiling.compile_grammar(compiling.Tokens(vocabulary().packed), "regex", "a+")
    templates = rows.Templates()

    def known() -> list[tuple[str, str]]:
        keys = [(tenant, key) for tenant in "abc" for key in "1234"]
        return [each for each in keys if templates.get(*each) is not None]

    for tenant, key, size in (("a", "1", 10), ("a", "2", 10), ("a", "3", 10), ("b", "1", 10)):
        templates.add(tenant, key, matcher, size)
    assert known() == [("a", "2"), ("a", "3"), ("b", "1")]
    templates.add("c", "1", matcher, 10)
    assert known() == [("a", "3"), ("b", "1"), ("c", "1")]
    templates.add("a", "4", matcher, 95)
    assert known() == [("a", "4"), ("b", "1"), ("c", "1")]


def test_as_many_choices_as_the_limit_says(processes: CheckProcesses) -> None:
    choices = [f"{'long ' * 9}choice {index}" for index in range(MAX_CHOICE_TEXTS)]
    verdict, _ = processes.check(Grammar.choice(choices))
    assert verdict.error == ""


def test_choices_are_literal() -> None:
    """No character has a meaning, also beside others."""
    tokens = compiling.Tokens(vocabulary().packed)
    choices = [
        *(chr(each) for each in range(256) if each not in (SPECIAL, END)),
        "<|call|>",
        "a|b",
        "a\\",
        "\\d",
        "(?i)z",
        "[^",
        "a{2}",
        "%json {}",
        "日\u2028\U0001f600e\u0301",
    ]
    template = compiling.compile_grammar(tokens, "choice", json.dumps(choices))
    for choice in choices:
        matcher = template.deep_copy()
        assert matcher.consume_tokens(list(choice.encode())), choice
        assert matcher.is_accepting(), choice
    for other in ("Z", "aa", "call", "5", "a|", "{"):
        matcher = template.deep_copy()
        is_taken = matcher.try_consume_tokens(list(other.encode())) == len(other)
        assert (is_taken and matcher.is_accepting()) == (len(other) == 1), other


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    lark = compiling.to_lark("json_schema", json.dumps({"properties": {"b": {}, "a": {}}}))
    assert lark.index('"b"') < lark.index('"a"')
