"""Structured answers of engines: at temperature 1 a random model's answers are valid only if its
masks make them so."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import pytest

from inference_svc.core import FinishReason, Part, Sum, VersionPolicy
from inference_svc.engine.transport.messages import Move, SetVocabulary
from inference_svc.grammars.budget import ThoughtBudget
from inference_svc.grammars.checks import CheckProcesses
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.thoughts import ThoughtParts
from inference_svc.results.logprobs import LogprobsMode
from servicekit.errors import Unavailable
from tests.support.pairs import PATHS
from tests.system.engines import Running
from tests.system.structured import Schema, random_schemas, suite, text_of, zoo_vocabulary

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPT = list(map(ord, "a person: "))
ANSWER = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 150}
LETTERS = Grammar.regex("[ab]{20}")
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def checks() -> Iterator[CheckProcesses]:
    made = CheckProcesses(zoo_vocabulary)
    yield made
    made.close()


def structured(running: Running) -> Running:
    running.engine.send(SetVocabulary(zoo_vocabulary()))
    return running


@dataclass
class Tally:
    """The answers to schemas: how many were valid, incomplete, and refused by a word."""

    valid: int = 0
    incomplete: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.valid + self.incomplete + self.refused.total()


def answers(
    running: Running, checks: CheckProcesses, schemas: list[Schema], validator: Any
) -> Tally:
    """Checks an answer to each schema that is accepted."""
    tally, asked = Tally(), {}
    for index, schema in enumerate(schemas):
        grammar = Grammar.json_schema(schema, "schema")
        verdict, _ = checks.check(grammar)
        if verdict.error:
            tally.refused[verdict.error.split('"')[1] if '"' in verdict.error else "other"] += 1
            continue
        asked[f"{index}"] = schema
        running.submit(f"{index}", PROMPT, grammar=grammar, seed=index, **ANSWER)
    for name, schema in asked.items():
        tokens, last = running.result(name)
        assert last.error is None, (schema, last.error)
        if last.finish_reason is FinishReason.LENGTH:
            tally.incomplete += 1
            continue
        assert last.finish_reason is FinishReason.STOP
        value = json.loads(text_of(tokens))
        validator(schema).validate(value)
        tally.valid += 1
    running.check_idle()
    return tally


@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_the_suites_schemas(
    path: str, start: Callable[..., Running], checks: CheckProcesses
) -> None:
    schemas = list(suite().values())
    running = structured(start("llama", native_kernels=PATHS[path], max_queue=2000))
    tally = answers(running, checks, schemas, jsonschema.Draft4Validator)
    assert tally.total == len(schemas)
    assert tally.valid > 45
    assert tally.refused.total() < 25, tally.refused
    assert {"not", "uniqueItems", "dependencies"} <= set(tally.refused)


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=pytest.mark.long)], ids=lambda count: f"{count}"
)
def test_random_schemas(count: int, start: Callable[..., Running], checks: CheckProcesses) -> None:
    running = structured(start("llama", max_queue=2000, max_sequences=16))
    schemas = list(random_schemas(count))
    tally = answers(running, checks, schemas, jsonschema.Draft202012Validator)
    assert tally.total == count
    assert tally.valid > 0.55 * count, tally
    assert tally.refused.total() < 0.2 * count, tally.refused


def test_other_rows_and_batches_change_nothing(start: Callable[..., Running]) -> None:
    """An answer is the same alone and beside others, and so is one without a form."""
    running = structured(start("llama"))
    forms: dict[str, Grammar | None] = {"letters": LETTERS, "plain": None}
    for seed in range(3):
        for name, grammar in forms.items():
            options = {**ANSWER, "max_tokens": 24, "seed": seed, "grammar": grammar}
            running.submit(f"{name} {seed} alone", PROMPT, **options)
            running.result(f"{name} {seed} alone")
    for seed in range(3):
        for name, grammar in forms.items():
            options = {**ANSWER, "max_tokens": 24, "seed": seed, "grammar": grammar}
            running.submit(f"{name} {seed}", PROMPT, **options)
    for seed in range(3):
        for name in forms:
            found = running.result(f"{name} {seed}")[0]
            assert found == running.result(f"{name} {seed} alone")[0], name
    assert re.fullmatch("[ab]{20}", text_of(running.result("letters 0")[0]))
    running.check_idle()


@pytest.mark.parametrize("shape", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_with_everything_else(shape: dict[str, int], start: Callable[..., Running]) -> None:
    """Adapters and their sums, penalties, cuts, log probabilities, stop tokens and n; also where
    another process computes the logits."""
    running = structured(start("llama", **shape))
    digests = running.digests
    both = Sum((Part(digests["r3"], 0.5), Part(digests["r16"], 1.0)))
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "adapter": ("r16", {}),
        "sum": (both, {}),
        "greedy": ("", {"temperature": 0.0}),
        "penalties": ("r3", {"repetition_penalty": 1.5, "presence_penalty": 2.0}),
        "cut": ("", {"top_k": 3, "top_p": 0.8, "min_p": 0.05}),
        "raw": ("", {"logprobs": 5}),
        "processed": ("", {"logprobs": 5, "logprobs_mode": LogprobsMode.PROCESSED}),
        "first": ("", {"group": "g"}),
        "second": ("", {"group": "g", "seed": 1}),
    }
    for name, (adapter, options) in cases.items():
        running.submit(name, PROMPT, adapter, grammar=LETTERS, **{**ANSWER, **options})
    for name in cases:
        tokens, last = running.result(name)
        assert last.finish_reason is FinishReason.STOP, (name, last.error)
        assert re.fullmatch("[ab]{20}", text_of(tokens)), name
    running.submit("stopped", PROMPT, grammar=LETTERS, stop_token_ids=(ord("b"),), **ANSWER)
    tokens, last = running.result("stopped")
    assert last.finish_reason is FinishReason.STOP
    assert re.fullmatch("a*b|a{20}", text_of(tokens)), "a stop token ends where it comes"
    for output in running.outputs["processed"]:
        [part] = output.parts
        assert part.logprob == pytest.approx(0.0, abs=9), "it is the masked distribution's"
        assert len([each for each in part.top if each[1] > float("-inf")]) <= 2
    running.check_idle()


def test_preempted_answers_go_on(start: Callable[..., Running]) -> None:
    """With too few pages for all: a matcher begins again after the tokens of its sequence."""
    options = {**ANSWER, "grammar": Grammar.regex("[a-e]{90}")}
    found = {}
    for name, kv_bytes in (("plenty", 4 << 20), ("short", 150 << 10)):
        running = structured(start("llama", kv_bytes=kv_bytes, prefix_cache=False))
        with running.together():
            for seed in range(6):
                running.submit(f"{seed}", PROMPT, seed=seed, **options)
        found[name] = [running.result(f"{seed}")[0] for seed in range(6)]
        assert all(re.fullmatch("[a-e]{90}", text_of(each)) for each in found[name])
        is_preempted = running.engine.built.engine.scheduler.num_preemptions > 0
        assert is_preempted == (name == "short")
        running.check_idle()
    assert found["plenty"] == found["short"]


THINK, ANSWERED = ord("<"), ord(">")
FORMED = LETTERS.after(ThoughtParts(["<"], ">", [], is_begun=True))


def thoughts_of(tokens: list[int]) -> tuple[str, str]:
    thoughts, _, rest = text_of(tokens).partition(">")
    return thoughts, rest


@pytest.mark.parametrize("path", PATHS)
def test_thoughts_end_at_their_budget(path: str, start: Callable[..., Running]) -> None:
    """Alone and beside others, with and without a form, and with everything that bans tokens."""
    running = structured(start("llama", native_kernels=PATHS[path]))
    begun = ThoughtBudget(8, (THINK,), ANSWERED, is_begun=True)
    options: dict[str, dict[str, Any]] = {
        "plain": {"max_tokens": 30, "ignore_eos": True},
        "greedy": {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True},
        "formed": {"grammar": FORMED},
        "adapter": {"grammar": FORMED, "repetition_penalty": 1.5, "top_k": 2},
        "banned": {"max_tokens": 30, "min_tokens": 20, "stop_token_ids": (ord("~"),)},
        "scored": {"max_tokens": 12, "ignore_eos": True, "logprobs": 2},
        "none": {"budget": replace(begun, max_tokens=0), "grammar": FORMED},
    }
    for name, given in options.items():
        adapter = "r16" if name == "adapter" else ""
        given.setdefault("logprobs_mode", LogprobsMode.PROCESSED)
        running.submit(name, PROMPT, adapter, **{**ANSWER, "budget": begun, "seed": 3, **given})
    for name in options:
        tokens, last = running.result(name)
        assert last.error is None
        thoughts, rest = thoughts_of(tokens)
        assert len(thoughts) <= (0 if name == "none" else 8), name
        assert ANSWERED in tokens, name
        if name in ("formed", "adapter", "none"):
            assert re.fullmatch("[ \\n]{0,3}[ab]{20}", rest), name
    parts = [output.parts[0] for output in running.outputs["scored"]]
    place = running.result("scored")[0].index(ANSWERED)
    assert place == 8
    assert parts[place].logprob == 0.0
    running.check_idle()


def test_preempted_thoughts_keep_their_budget(start: Callable[..., Running]) -> None:
    options = {**ANSWER, "grammar": FORMED}
    options["budget"] = ThoughtBudget(60, (THINK,), ANSWERED, is_begun=True)
    found = {}
    for name, kv_bytes in (("plenty", 4 << 20), ("short", 150 << 10)):
        running = structured(start("llama", kv_bytes=kv_bytes, prefix_cache=False))
        with running.together():
            for seed in range(6):
                running.submit(f"{seed}", PROMPT, seed=seed, **options)
        found[name] = [running.result(f"{seed}")[0] for seed in range(6)]
        assert max(len(thoughts_of(each)[0]) for each in found[name]) <= 60
        is_preempted = running.engine.built.engine.scheduler.num_preemptions > 0
        assert is_preempted == (name == "short")
        running.check_idle()
    assert found["plenty"] == found["short"]


def test_answers_go_on_with_newer_versions(start: Callable[..., Running]) -> None:
    """Whether their state is kept or computed again."""
    running = structured(start("llama"))
    options = {**ANSWER, "grammar": Grammar.regex("[a-e]{100}")}
    policies = (VersionPolicy.FOLLOW_KEEP, VersionPolicy.FOLLOW_RECOMPUTE)
    for policy in policies:
        running.submit(policy.value, PROMPT, "r3", version_policy=policy, **options)
        running.until(lambda policy=policy: len(running.outputs.get(policy.value, ())) > 5)
        running.engine.send(Move(policy.value, running.digests["r16"], "acme/r16@2"))
    for policy in policies:
        tokens, last = running.result(policy.value)
        assert re.fullmatch("[a-e]{100}", text_of(tokens)), last.error
        assert last.version is not None
        assert last.version.digest == running.digests["r16"]
    running.check_idle()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", {}),
        ("qwen3_5", {"tensor_parallel": 2}),
        pytest.param("qwen3_5", {"pipeline_parallel": 2}, marks=pytest.mark.long),
    ],
)
def test_a_slow_form_delays_nobody(
    kind: str, shape: dict[str, int], start: Callable[..., Running]
) -> None:
    """While the process of slow forms stands still, answers with other forms, and without one, go
    on. All ranks compute a row that is late once more, from the same state."""
    running = structured(start(kind, **shape))
    slow = replace(LETTERS, is_slow=True)
    running.submit("first", PROMPT, grammar=slow, **ANSWER)
    running.result("first")
    _, lane = running.engine.built.engine.masks.lanes
    assert lane.process_id is not None
    os.kill(lane.process_id, signal.SIGSTOP)
    try:
        running.submit("slow", PROMPT, grammar=slow, **ANSWER)
        for name, grammar in (("form", LETTERS), ("plain", None)):
            running.submit(name, PROMPT, grammar=grammar, **ANSWER)
            assert running.result(name)[1].error is None
        assert not running.is_done("slow")
        gauges = running.engine.built.engine.commands.describe().gauges
        assert (gauges["grammar_rows"], gauges["grammar_slow_rows"]) == (1, 1)
    finally:
        os.kill(lane.process_id, signal.SIGCONT)
    assert re.fullmatch("[ab]{20}", text_of(running.result("slow")[0]))
    running.check_idle()


def test_a_form_that_turns_out_to_be_costly_ends_alone(start: Callable[..., Running]) -> None:
    """The engine's error names the field; other answers go on."""
    running = structured(start("llama"))
    states = Grammar.json_schema({"type": "string", "minLength": 10**6}, "the.field")
    bad = Grammar.regex("(", "the.field")
    for name, grammar in (("bad", bad), ("good", LETTERS), ("long", states), ("plain", None)):
        running.submit(name, PROMPT, grammar=grammar, **ANSWER)
    assert running.result("bad")[1].error is not None
    assert str(running.result("bad")[1].error).startswith("the.field: ")
    assert running.result("long")[1].finish_reason is FinishReason.LENGTH
    for name in ("good", "plain"):
        assert running.result(name)[1].error is None
    running.check_idle()


def test_an_answer_without_tokens_has_no_masks(start: Callable[..., Running]) -> None:
    """Its prompt is all that is computed."""
    running = structured(start("llama"))
    running.submit("prompt", PROMPT, grammar=LETTERS, **{**ANSWER, "max_tokens": 0})
    tokens, last = running.result("prompt")
    assert (tokens, last.finish_reason) == ([], FinishReason.LENGTH)
    assert not running.engine.built.engine.masks.lanes, "no process has started"


def test_a_machine_that_starts_no_process_is_named(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form is not to blame: the request can be tried again, and others go on."""
    running = structured(start("llama"))
    monkeypatch.setattr(sys, "executable", "/no/python")
    running.submit("form", PROMPT, grammar=replace(LETTERS, field="the.field"), **ANSWER)
    running.submit("plain", PROMPT, **ANSWER)
    error = running.result("form")[1].error
    assert isinstance(error, Unavailable)
    assert str(error).startswith("the.field: this server cannot compute forms")
    assert running.result("plain")[1].error is None
    running.check_idle()
