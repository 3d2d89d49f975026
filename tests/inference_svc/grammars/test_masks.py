"""Masks of running sequences: random answers, lanes that restart, rows that are late."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.lanes import lane, process
from inference_svc.grammars.lanes.lane import Row
from inference_svc.grammars.lanes.messages import Written
from inference_svc.grammars.lanes.process import SLOW_NICENESS
from inference_svc.grammars.masks import MAX_LATE, PATIENT_MASKS, PATIENT_TOKENS, Masks
from tests.inference_svc.grammars.alphabet import (
    END,
    SPECIAL,
    allowed,
    choose,
    text_of,
    vocabulary,
)
from tests.support.wait import until

pytestmark = pytest.mark.processes

LIST = Grammar.json_schema({"type": "array", "items": {"enum": ["é", 1, None]}, "maxItems": 4})


MAX_ROWS = 8


class House:
    """Masks, and how often the engine would have been woken."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        self.masks = Masks(self.woken.release, MAX_ROWS)
        self.masks.set_vocabulary(vocabulary())

    def open(self, grammar: Grammar, tokens: list[int] | None = None, tenant: str = "t") -> Row:
        return self.masks.open("r", grammar, tenant, list(tokens or ()))

    def ready(self, *rows: Row) -> None:
        """Returns once all masks are there, or failed."""
        self.masks.flush()
        for row in rows:
            if row.lane is not None:  # as for an engine that has nothing to compute
                row.lane.hand_over()
        until(lambda: not {id(row) for row in rows if not row.is_ready}, 60)
        assert not self.masks.wait([row for row in rows if not row.error])

    def answer(self, row: Row, chosen: random.Random, max_tokens: int = 400) -> str:
        for _ in range(max_tokens):
            self.ready(row)
            token = choose(row, chosen)
            if token is None:
                return text_of(row.tokens)
            self.masks.accept(row, token)
        raise AssertionError("it does not end")

    def pid_of(self, row: Row) -> int:
        assert row.lane is not None
        assert row.lane.process_id is not None
        return row.lane.process_id


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.masks.close()


def test_random_answers_have_the_form(house: House) -> None:
    chosen = random.Random(5)
    cases: list[tuple[Grammar, Callable[[str], object]]] = [
        (LIST, lambda text: isinstance(json.loads(text), list)),
        (Grammar.regex("[a-c]{2}|日本?"), lambda text: re.fullmatch("[a-c]{2}|日本?", text)),
        (Grammar.choice(["yes", 'n"o', "\n"]), lambda text: text in ("yes", 'n"o', "\n")),
        (Grammar.grammar('start: "<" /[a-z]{1,3}/ ">"'), lambda text: text.endswith(">")),
        (Grammar.grammar("start: <|call|> %json {}"), lambda text: json.loads(text) or True),
    ]
    for grammar, fits in cases:
        for _ in range(8):
            row = house.open(grammar)
            text = house.answer(row, chosen)
            assert fits(text), (grammar, text)
            house.masks.close_row(row)
    counts = house.masks.counts
    # More are opened if a process could not start at first.
    assert counts.num_opened >= 8 * len(cases)
    assert counts.num_hits == 7 * len(cases), "each is compiled once"
    assert counts.num_masks > counts.num_opened


def test_masks_have_special_tokens_only_where_they_are_named(house: House) -> None:
    any_text = house.open(Grammar.regex("(?s:.)*"))
    called = house.open(Grammar.grammar("start: <|call|> /b/"))
    house.ready(any_text, called)
    tokens = allowed(any_text)
    assert SPECIAL not in tokens
    assert END not in tokens
    assert any_text.may_end
    assert allowed(called) == [SPECIAL]
    assert not called.may_end


def test_a_row_begins_again_after_its_tokens(house: House) -> None:
    """As after a preemption."""
    row = house.open(Grammar.regex("abc"))
    for token in b"ab":
        house.ready(row)
        house.masks.accept(row, token)
    house.ready(row)
    again = house.open(Grammar.regex("abc"), row.tokens)
    house.masks.close_row(row)
    house.ready(again)
    assert allowed(again) == list(b"c")


def test_rows_go_on_when_their_process_ends(house: House) -> None:
    """Each goes on after its tokens."""
    rows = [house.open(Grammar.regex("[ab]{30}")) for _ in range(5)]
    chosen = random.Random(1)
    for number in range(30):
        house.ready(*rows)
        if number == 10:
            os.kill(house.pid_of(rows[0]), signal.SIGKILL)
        for row in rows:
            token = choose(row, chosen)
            assert token is not None
            house.masks.accept(row, token)
    house.ready(*rows)
    assert all(re.fullmatch("[ab]{30}", text_of(row.tokens)) and row.may_end for row in rows)
    assert house.masks.counts.num_restarts == 1


def test_steps_need_no_thread_of_the_lane(house: House) -> None:
    """The engine's sends the tokens of a step, and takes the answer."""
    rows = [house.open(Grammar.regex("[ab]{9}")) for _ in range(5)]
    house.ready(*rows)
    fast = rows[0].lane
    assert fast is not None
    for _ in range(9):
        for row in rows:
            house.masks.accept(row, ord("a"))
        house.masks.flush()
        assert fast.has_sent
        while house.masks.wait(rows):  # a busy machine
            house.ready(*rows)
    assert all(row.may_end and not allowed(row) for row in rows)
    assert house.masks.counts.num_restarts == 0


def test_rows_go_on_when_their_process_ends_with_their_tokens(house: House) -> None:
    """Neither the answer to sent tokens nor a mask that nobody has used is lost."""
    waits, goes = house.open(Grammar.regex("[xy]z")), house.open(Grammar.regex("[ab]{3}"))
    house.ready(waits, goes)
    os.kill(house.pid_of(goes), signal.SIGSTOP)
    house.masks.accept(goes, ord("a"))
    house.masks.flush()
    assert house.masks.wait([waits, goes]) == {id(goes)}
    os.kill(house.pid_of(goes), signal.SIGKILL)
    until(lambda: house.masks.counts.num_restarts == 1, 60)
    assert allowed(waits) == list(b"xy")
    house.ready(goes, waits)
    assert allowed(waits) == list(b"xy")
    assert allowed(goes) == list(b"ab")
    house.masks.accept(waits, ord("x"))
    house.ready(waits)
    assert allowed(waits) == list(b"z")


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_process_that_hangs_is_waited_for_or_ended(
    house: House, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    """Steps go on without its rows meanwhile, and the engine is woken for them."""
    if is_ended:
        task = process.TASK
        limits = replace(task.limits, wall_seconds=5.0)
        monkeypatch.setattr(process, "TASK", replace(task, limits=limits))
    row = house.open(Grammar.regex("[ab]{3}"))
    house.ready(row)
    os.kill(house.pid_of(row), signal.SIGSTOP)
    house.masks.accept(row, ord("a"))
    house.masks.flush()
    assert house.masks.wait([row]) == {id(row)}
    assert house.masks.num_computable(row, 1, 1) == 0
    if not is_ended:
        os.kill(house.pid_of(row), signal.SIGCONT)
    assert house.woken.acquire(timeout=60)
    assert allowed(row) == list(b"ab")
    assert house.masks.counts.num_restarts == is_ended


def test_an_answer_that_is_none_ends_its_process(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = house.open(Grammar.regex("[ab]{3}"))
    house.ready(row)
    with monkeypatch.context() as once:
        once.setattr(Written, "unpack", lambda _: struct.unpack("<I", b""))
        house.masks.accept(row, ord("a"))
        house.masks.flush()
        assert house.masks.wait([row]) == {id(row)}
        until(lambda: house.masks.counts.num_restarts > 0, 60)
    house.ready(row)
    assert allowed(row) == list(b"ab")


def test_the_engine_reads_no_long_answer(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane's thread does, and nothing restarts."""
    threads, receive = [], process.LaneProcess.receive

    def noted(lane_process: process.LaneProcess) -> Written:
        threads.append(threading.current_thread())
        return receive(lane_process)

    monkeypatch.setattr(process, "usual_bytes", lambda _: 0)
    monkeypatch.setattr(process.LaneProcess, "receive", noted)
    row = house.open(Grammar.regex("[ab]{3}"))
    house.ready(row)
    house.masks.accept(row, ord("a"))
    house.masks.flush()
    while house.masks.wait([row]):  # a busy machine
        house.ready(row)
    assert allowed(row) == list(b"ab")
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert house.masks.counts.num_restarts == 0


def test_rows_that_open_take_the_memory_of_ended_ones(house: House) -> None:
    stays = house.open(Grammar.regex("[xy]{2}"))
    for index in range(3 * MAX_ROWS):
        row = house.open(Grammar.choice([chr(ord("a") + index)]))
        house.ready(stays, row)
        assert allowed(row) == [ord("a") + index]
        house.masks.close_row(row)
    assert allowed(stays) == list(b"xy")
    full = [house.open(Grammar.regex("[ab]")) for _ in range(MAX_ROWS - 1)]
    house.ready(stays, *full)
    assert all(allowed(row) == list(b"ab") for row in full)
    assert house.masks.counts.num_restarts == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_closing_frees_the_memory_of_masks() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:loadout-masks")

    gc.collect()
    before, house = mapped(), House()
    row = house.open(Grammar.regex("ab"))
    house.ready(row)
    assert mapped() == before + 1
    os.kill(house.pid_of(row), signal.SIGKILL)
    house.masks.accept(row, ord("a"))
    house.ready(row)
    assert house.masks.counts.num_restarts == 1
    house.masks.close()
    assert allowed(row) == [ord("b")], "it is used"
    del row, house
    gc.collect()
    assert mapped() == before


def test_a_row_that_ends_processes_fails_alone(house: House) -> None:
    """It is computed again in the slow lane first; others go on."""
    good = house.open(LIST)
    house.ready(good)
    bad = house.open(Grammar.json_schema({"type": "integer", "multipleOf": 999_983}))

    for number in range(2):
        until(lambda: bad.lane is not None and bad.lane.is_opening(bad), 60)
        os.kill(house.pid_of(bad), signal.SIGKILL)
        until(lambda number=number: house.masks.counts.num_restarts == number + 1, 60)
    until(lambda: bool(bad.error), 60)
    assert bad.error == "takes too much time or memory: simplify it"
    assert house.masks.pop_failed() == [bad]
    assert house.answer(good, random.Random(2)).startswith("[")


def test_rows_that_end_before_they_begin_cost_nothing(house: House) -> None:
    """As cancelled requests: their masks would be more than an answer has room for."""
    first = house.open(LIST)  # while its process starts
    for index in range(120):
        house.masks.close_row(house.open(Grammar.regex(f"[a-z]{{{index + 1}}}")))
    house.ready(first)
    house.masks.accept(first, ord("["))
    house.ready(first)
    counts = house.masks.counts
    assert (counts.num_opened, counts.num_masks, counts.num_restarts) == (1, 2, 0)


def test_rows_beside_one_that_ends_processes_are_not_blamed(house: House) -> None:
    """Each takes a turn alone, and goes back."""
    bad = house.open(Grammar.json_schema({"type": "integer", "multipleOf": 999_983}))
    good = [house.open(LIST) for _ in range(3)]
    fast = bad.lane
    assert fast is not None
    until(lambda: all(fast.is_opening(each) for each in (bad, *good)), 60)
    for number in range(3):
        until(lambda: bad.lane is not None and bad.lane.is_opening(bad), 60)
        os.kill(house.pid_of(bad), signal.SIGKILL)
        until(lambda number=number: house.masks.counts.num_restarts == number + 1, 60)
    until(lambda: bool(bad.error), 60)
    house.ready(*good)
    until(lambda: all(each.lane is fast for each in good), 60)
    assert [each.num_ends for each in good] == [0, 0, 0]
    assert house.masks.pop_failed() == [bad]


def test_a_machine_that_starts_no_process_fails_rows_for_now(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lanes go on: they begin again once they can."""
    monkeypatch.setattr(lane, "FAULT_PAUSE_SECONDS", 0.01)
    with monkeypatch.context() as without:
        without.setattr(sys, "executable", "/no/python")
        row = house.open(LIST)
        assert house.woken.acquire(timeout=60)
        assert house.masks.pop_failed() == [row]
        assert row.is_fault
        assert row.error.endswith("try again later, or another server")
    assert house.answer(house.open(LIST), random.Random(2)).startswith("[")


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread is Linux's")
def test_only_the_slow_process_is_nice(house: House) -> None:
    """Its thread is the engine's, and has locks that the engine waits for."""
    slow, fast = house.open(replace(LIST, is_slow=True)), house.open(LIST)
    house.ready(slow, fast)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, house.pid_of(slow)) == SLOW_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, house.pid_of(fast)) == mine
    threads = {each.name: each.native_id for each in threading.enumerate()}
    thread = threads["loadout-slow-masks"]
    assert thread is not None
    assert os.getpriority(os.PRIO_PROCESS, thread) == mine


def test_late_rows_wake_the_engine(house: House) -> None:
    row = house.open(LIST)
    late = house.masks.wait([row])  # its process has not started yet
    assert late == {id(row)}
    assert row.was_late
    assert house.masks.num_computable(row, 1, 1) == 0
    assert house.woken.acquire(timeout=60)
    assert row.is_ready
    assert house.masks.num_computable(row, 1, 1) == 1
    assert not house.masks.wait([row])
    assert not row.was_late
    assert house.masks.counts.num_late == 1


def test_rows_that_are_late_again_and_again_are_patient(house: House) -> None:
    """Else nearly each step of all rows would wait for them. They are tried again at times."""
    row = house.open(Grammar.regex("[a-z]*"))
    house.ready(row)

    def step(is_late: bool) -> int:
        """Computes the next token; returns how many of one token may be computed at once."""
        house.masks.accept(row, ord("a"))
        assert row.mask is None
        num = house.masks.num_computable(row, 1, 1)
        if is_late:  # its process has not even been told
            assert house.masks.wait([row]) == {id(row)}
        house.ready(row)
        return num

    assert [step(True) for _ in range(2)] == [1, 1]
    step(False)
    assert row.num_late == 0
    assert [step(True) for _ in range(MAX_LATE)] == [1] * MAX_LATE
    assert [step(False) for _ in range(PATIENT_MASKS - 1)] == [0] * (PATIENT_MASKS - 1)
    assert step(True) == 1, "one more try"
    assert step(False) == 0
    slow = house.open(replace(LIST, is_slow=True))
    assert house.masks.num_computable(slow, 1, 1) == 0


def test_long_prompts_wait_for_their_mask(house: House) -> None:
    row = house.open(LIST)
    assert house.masks.num_computable(row, 10, 20) == 10
    assert house.masks.num_computable(row, PATIENT_TOKENS, PATIENT_TOKENS) == PATIENT_TOKENS
    long = PATIENT_TOKENS + 1
    assert house.masks.num_computable(row, long, long) == PATIENT_TOKENS
    house.ready(row)
    assert house.masks.num_computable(row, long, long) == long


def test_failures_are_reported_once(house: House) -> None:
    row = house.open(Grammar.regex("("))
    assert house.woken.acquire(timeout=60)
    assert house.masks.pop_failed() == [row]
    assert "unclosed" in row.error
    assert house.masks.pop_failed() == []
    house.masks.accept(row, 5)
    house.masks.close_row(row)


def test_closing_ends_a_process_that_computes() -> None:
    house = House()
    house.open(Grammar.json_schema({"type": "integer", "multipleOf": 999_983}))
    house.masks.close()
    assert not [each for each in threading.enumerate() if "masks" in each.name]
