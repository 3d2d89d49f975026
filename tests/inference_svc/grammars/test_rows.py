"""Rows of a lane's process: who is compiled and computed first, and what closing a row ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inference_svc.grammars import compiling
from inference_svc.grammars.lanes import rows
from inference_svc.grammars.lanes.memory import MaskMemory, MaskPlaces, WrittenMasks
from inference_svc.grammars.lanes.messages import Work, Written
from tests.inference_svc.grammars.alphabet import vocabulary
from tests.support.wait import until

TOKENS = compiling.Tokens(vocabulary().packed)


def opening(row_id: int, tenant: str = "t", source: str = "[a-z]{9}") -> dict[str, Any]:
    return {
        "id": row_id,
        "slot": row_id,
        "tenant": tenant,
        "key": f"{tenant} {source}",
        "kind": "regex",
        "source": source,
        "tokens": [],
    }


class Asked:
    """Rows, and the masks that they have answered with, by the ids of rows."""

    def __init__(self) -> None:
        places = MaskPlaces(10, vocabulary().mask_bytes)
        self.memory = MaskMemory(places)
        self.rows = rows.Rows(TOKENS, WrittenMasks(self.memory.file, places))
        self.masks: list[int] = []

    def ask(self, *opens: dict[str, Any], steps: Any = (), closes: Any = ()) -> Written:
        work = Work(list(steps), list(opens), list(closes))
        written = Written.unpack(self.rows.take(Work.unpack(work.pack())).pack())
        self.masks += [row_id for row_id, *_ in written.masks]
        return written

    def all_masks(self, num: int) -> list[int]:
        until(lambda: [self.ask()] and len(self.masks) >= num, 60)
        assert not self.ask().has_more
        found, self.masks = self.masks, []
        return found


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.memory.close()


def test_an_answer_takes_a_moment(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's many rows do not make another's wait for all of them."""
    ids = range(1, 7)
    asked.ask(*(opening(each, "many") for each in ids), opening(7, "one"))
    assert sorted(asked.all_masks(7)) == [*ids, 7]
    monkeypatch.setattr(rows, "ANSWER_SECONDS", 0.0)
    header = asked.ask(steps=[(each, ord("a")) for each in (*ids, 7)])
    assert len(header.masks) == 1
    assert header.has_more
    asked.ask()
    assert 7 in asked.masks, "its tenant's turn is the first or the second"
    assert sorted(asked.all_masks(7)) == [*ids, 7]


def test_cheap_rows_are_first(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their last mask's cost; but a row that has waited long enough is before them."""
    asked.ask(*(opening(each) for each in (1, 2, 3)))
    asked.all_masks(3)
    for row_id, cost_s in ((1, 5.0), (2, 3.0), (3, 4.0)):
        asked.rows._rows[row_id].cost_s = cost_s
    monkeypatch.setattr(rows, "ANSWER_SECONDS", 0.0)
    asked.ask(steps=[(each, ord("a")) for each in (1, 2, 3)])
    asked.rows._rows[1].due_s -= 1000
    assert asked.all_masks(3) == [2, 1, 3]


def test_a_row_that_begins_again_takes_its_tokens_in_slices(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a preemption: other rows of its tenant have their masks in between."""
    asked.ask(opening(1, source="[ab]*"))
    asked.all_masks(1)
    monkeypatch.setattr(rows, "ANSWER_SECONDS", 0.0)
    num_tokens = 100 * rows.SLICE_TOKENS
    asked.ask({**opening(2, source="[ab]*b"), "tokens": [ord("a")] * num_tokens})
    until(lambda: not asked.ask().is_busy, 60)
    for step in range(1, 6):
        header = asked.ask(steps=[(1, ord("b"))])
        assert header.masks == [(1, step, True)]
        assert header.has_more
        asked.ask()
    asked.masks.clear()
    assert asked.all_masks(1) == [2]
    assert asked.rows._rows[2].num_tokens == num_tokens
    assert not asked.ask(steps=[(2, ord("b"))]).slow


def test_a_row_that_opens_and_ends_at_once_is_forgotten(asked: Asked) -> None:
    asked.ask(opening(1), opening(2), closes=[1])
    assert asked.all_masks(1) == [2]
    asked.ask(steps=[(1, ord("a"))], closes=[2])
    assert not asked.rows._rows
    assert not asked.rows._due


def test_errors_are_cut(asked: Asked) -> None:
    """They may quote a grammar of hundreds of kilobytes."""
    source = "root ::= " + "x" * 3000
    written = asked.ask({**opening(1, source=source), "kind": "ebnf"})
    while not written.errors:  # it compiles in a thread
        written = asked.ask()
    [(row_id, error)] = written.errors
    assert row_id == 1
    assert error.startswith("it is no EBNF")
    assert len(error) == compiling.MAX_ERROR_CHARS


class Compiles:
    """The sources that are compiled, in order; the first waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources: list[str] = []
        self.go = threading.Event()
        compile_grammar = compiling.compile_grammar

        def wait(tokens: compiling.Tokens, kind: str, source: str) -> Any:
            self.sources.append(source)
            assert self.go.wait(60)
            return compile_grammar(tokens, kind, source)

        monkeypatch.setattr(rows, "compile_grammar", wait)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiles]:
    made = Compiles(monkeypatch)
    yield made
    made.go.set()


def test_tenants_compile_in_turn(asked: Asked, compiles: Compiles) -> None:
    """And not at all for rows that have ended."""
    many = [opening(each, "many", f"a{{{each}}}") for each in range(1, 9)]
    asked.ask(*many, opening(9, "one", "b"))
    asked.ask(closes=range(2, 7))
    compiles.go.set()
    assert sorted(asked.all_masks(4)) == [1, 7, 8, 9]
    assert sorted(compiles.sources) == ["a{1}", "a{7}", "a{8}", "b"]
    assert compiles.sources.index("b") in (1, 2), "the thread may begin before the others wait"
    until(lambda: not asked.ask().is_busy, 60)


def test_a_queue_is_not_a_long_compile(
    asked: Asked, compiles: Compiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the grammar that is compiled is blamed, and also after its row has ended."""
    asked.ask(opening(1, source="a"), opening(2, source="b"))
    until(lambda: bool(compiles.sources), 60)
    assert asked.ask().stuck is None
    monkeypatch.setattr(rows, "MAX_OPEN_SECONDS", -1.0)
    assert asked.ask().stuck == 1
    header = asked.ask(closes=[1])
    assert header.stuck == 1
    assert header.is_busy


def test_a_compile_without_memory_is_one_rows(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends for it at once, and for no other."""

    def fail(tokens: compiling.Tokens, kind: str, source: str) -> Any:
        raise MemoryError

    monkeypatch.setattr(rows, "compile_grammar", fail)
    asked.ask(opening(1, source="a"), opening(2, source="b"))
    until(lambda: asked.ask().stuck == 1, 60)
    assert not asked.masks


def test_slow_rows_are_named(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few slow steps, or a very slow one; not for the first mask."""
    asked.ask(opening(1))
    asked.all_masks(1)
    monkeypatch.setattr(rows, "SLOW_STEP_SECONDS", 0.0)
    monkeypatch.setattr(rows, "MAX_SLOW_STEPS", 3)
    slow = [asked.ask(steps=[(1, ord("a"))]).slow for _ in range(3)]
    assert slow == [[], [], [1]]
    monkeypatch.setattr(rows, "MAX_SLOW_STEPS", 99)
    monkeypatch.setattr(rows, "COSTLY_STEP_SECONDS", 0.0)
    assert asked.ask(steps=[(1, ord("a"))]).slow == [1]
