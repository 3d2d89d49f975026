"""Some seconds of chaos: `make soak` has ten minutes over each catalog. And its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.soak.chaos.ledger import (
    FRESH_S,
    RECOVERY_S,
    Answer,
    Event,
    Failed,
    Fault,
    Verdict,
    Written,
    calm_s,
    judge,
    without_fault,
)
from tests.soak.chaos.tenants import DROPPED, LOST, Book
from tests.support import forks

ROOT = Path(__file__).parents[2]
NAME, OTHER = "team-0/first", "team-1/first"
EVENTS = [Event(1, NAME, 1, "a"), Event(2, OTHER, 1, "b"), Event(3, NAME, 2, "b")]
WRITTEN = [
    Written(NAME, "a", 10.0, 1, 1),
    Written(OTHER, "b", 11.0, 2, 1),
    Written(NAME, "b", 12.0, 3, 2),
]
LATER_S = 12.0 + FRESH_S + 0.1


@pytest.mark.parametrize(
    ("catalog", "seconds", "flags"),
    [
        pytest.param("sqlite", 4, ["--forked", "--contents=8"], id="short"),
        pytest.param("sqlite", 60, [], marks=pytest.mark.long, id="sqlite"),
        pytest.param("postgresql", 60, [], marks=pytest.mark.long, id="postgresql"),
    ],
)
def test_services_under_faults_keep_their_promises(
    catalog: str, seconds: int, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = forks.run("tests.soak.chaos", f"--seconds={seconds}", f"--catalog={catalog}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr  # with the seed
    assert "nothing was lost, stale or wrong" in done.stdout
    counts = dict(line.rpartition(": ")[::2] for line in done.stdout.splitlines())
    assert any(what.startswith(("kill ", "stop ")) for what in counts)
    for what in ("acknowledged", "right by gRPC", "right by HTTP", "held to a revision"):
        assert int(counts[what]) > 0, done.stdout


def _judge(
    answers: Sequence[Answer] = (),
    faults: Sequence[Fault] = (),
    events: Sequence[Event] = EVENTS,
    written: Sequence[Written] = WRITTEN,
    forgetful: Sequence[str] = (),
) -> Verdict:
    return judge(events, written, answers, faults, forgetful)


def test_what_was_promised_and_kept_is_good() -> None:
    verdict = _judge([Answer(NAME, LATER_S, 3, 2, "b"), Answer(NAME, 12.5, 0, 1, "a")])
    assert verdict.is_good, verdict
    assert (verdict.counts["acknowledged"], verdict.counts["right by gRPC"]) == (3, 2)


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        (EVENTS[:2], "acknowledged"),
        ([*EVENTS[:2], Event(3, NAME, 2, "c")], "acknowledged"),
        ([EVENTS[0], EVENTS[2]], "gap"),
    ],
)
def test_what_is_lost_is_seen(events: list[Event], seen: str) -> None:
    assert seen in "".join(_judge(events=events).lost)


@pytest.mark.parametrize(
    ("answer", "faults", "is_stale"),
    [
        pytest.param(Answer(NAME, 12.1, 3, 1, "a"), (), True, id="older than asked for"),
        pytest.param(Answer(NAME, 12.1, 2, 1, "a"), (), False, id="as old as asked for"),
        pytest.param(Answer(NAME, LATER_S, 0, 1, "a"), (), True, id="a calm second later"),
        pytest.param(
            Answer(NAME, LATER_S, 0, 1, "a"), (Fault(12.5, 12.6),), False, id="not a calm one"
        ),
        pytest.param(
            Answer(NAME, 12.6 + RECOVERY_S + FRESH_S + 0.1, 0, 1, "a"),
            (Fault(12.5, 12.6),),
            True,
            id="a calm one after the fault",
        ),
        pytest.param(Answer(NAME, LATER_S, 0, 0, ""), (), True, id="gone, and it is there"),
        pytest.param(Answer(OTHER, 10.0, 0, 0, ""), (), False, id="not there yet"),
    ],
)
def test_what_is_stale_is_seen(answer: Answer, faults: tuple[Fault, ...], is_stale: bool) -> None:
    verdict = _judge([answer], faults)
    assert bool(verdict.stale) == is_stale
    assert not verdict.lost
    assert not verdict.wrong


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(NAME, 12.1, 0, 1, "a", is_right=False), id="other tokens"),
        pytest.param(Answer(NAME, 12.1, 0, 3, "c"), id="of no version"),
        pytest.param(Answer(NAME, 12.1, 0, 1, "b"), id="another version's digest"),
    ],
)
def test_what_is_wrong_is_seen(answer: Answer) -> None:
    assert _judge([answer]).wrong


def test_a_call_without_an_answer_may_have_happened_once() -> None:
    maybe = [*WRITTEN, Written(NAME, "c", 13.0)]
    assert _judge(written=maybe).is_good
    happened = [*EVENTS, Event(4, NAME, 3, "c")]
    assert _judge(events=happened, written=maybe).is_good
    twice = [*happened, Event(5, OTHER, 2, "c")]
    assert _judge(events=twice, written=maybe).wrong


def test_only_an_ephemeral_name_may_go_by_itself() -> None:
    gone = [*EVENTS, Event(4, NAME, 0, "")]
    assert _judge(events=gone).wrong
    assert _judge(events=gone, forgetful=[NAME]).is_good


def test_a_version_is_not_given_twice() -> None:
    again = [*EVENTS, Event(4, NAME, 2, "c")]
    written = [*WRITTEN, Written(NAME, "c", 13.0, 4, 2)]
    assert _judge(events=again, written=written).wrong


def test_calm_is_the_longest_time_without_a_fault() -> None:
    faults = [Fault(5.0, 6.0), Fault(5.5, 7.0)]
    assert calm_s(0.0, 20.0, faults) == 20.0 - 7.0 - RECOVERY_S
    assert calm_s(0.0, 8.0, faults) == 5.0
    assert calm_s(5.2, 8.0, faults) == 0.0
    assert calm_s(0.0, 4.0, faults) == 4.0


@pytest.mark.parametrize(
    "code", [LOST, "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", DROPPED]
)
def test_an_error_needs_a_fault(code: str) -> None:
    """Availability: what callers may see while something is broken, they do not see otherwise."""
    book = Book()
    book.note("gRPC", code, "why")
    assert not book.unexpected
    [failed] = book.failed
    end_s, calm = failed.ended_s, failed.calm_s
    for fault in (
        Fault(end_s - 20.0, end_s + 1.0),
        Fault(end_s - 20.0, end_s - 0.1),
        Fault(end_s - 20.0, end_s - RECOVERY_S - calm + 0.1),
    ):
        assert without_fault(book.failed, [fault]) == []
    late = Fault(end_s + 0.1, end_s + 9.0)
    for faults in ([], [late], [late, Fault(end_s - 20.0, end_s - RECOVERY_S - calm - 0.1)]):
        [found] = without_fault(book.failed, faults)
        assert found.startswith(f"gRPC: {code}: why, after {calm:g} s")


def test_errors_of_other_kinds_are_unexpected_at_any_time() -> None:
    book = Book()
    book.note("gRPC", "INTERNAL", "why")
    assert (book.unexpected, book.failed) == (["gRPC: INTERNAL: why"], [])
    assert without_fault([Failed("x", 10.0, 3.0)], [Fault(9.0, 9.5)]) == []
