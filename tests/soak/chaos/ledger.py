"""Everything that happened in a run, and the verdict: lost, stale, wrong, or an error of no kind
that callers are told of.

The catalog's history decides. A call without an answer may have happened, also long after: a store
that was stopped goes on with what it had received.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FRESH_S = 1.0
"""Time after which a change is seen by requests that ask for no revision, while nothing is broken:
what the documentation promises."""
RECOVERY_S = 3.0
"""Time after the end of a fault until the watch is connected again."""


class Event(NamedTuple):
    """A change of the catalog: afterwards the name points to this version, 0 for none."""

    revision: int
    name: str
    version: int
    digest: str


class Written(NamedTuple):
    """A push, registration, rollback (`digest` of its content) or deletion (""). Revision and
    version are 0 without an answer."""

    name: str
    digest: str
    ended_s: float
    revision: int = 0
    version: int = 0

    @property
    def is_acknowledged(self) -> bool:
        return self.revision > 0


class Answer(NamedTuple):
    """An answer for a name, `version` 0: that there is none. `is_right`: its tokens are those of
    its digest."""

    name: str
    begun_s: float
    min_revision: int
    version: int
    digest: str
    is_right: bool = True
    by: str = "gRPC"


class Fault(NamedTuple):
    """A time at which names may be seen late."""

    begun_s: float
    ended_s: float


class Failed(NamedTuple):
    """A call that ended with an error, in words, which only a fault explains: one at least that was
    not over, and recovered from, `calm_s` before."""

    what: str
    ended_s: float
    calm_s: float


class State(NamedTuple):
    """A name from a revision on, until before another."""

    since: int
    until: float
    version: int
    digest: str


@dataclass
class Verdict:
    """What must not be, in words, and counts."""

    lost: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.stale or self.wrong)


def judge(
    events: Sequence[Event],
    written: Sequence[Written],
    answers: Sequence[Answer],
    faults: Sequence[Fault],
    forgetful: Iterable[str] = (),
) -> Verdict:
    """`events` are the whole history. `forgetful` names may lose their current version by
    themselves, as ephemeral ones do with their store."""
    verdict = Verdict()
    revisions = [event.revision for event in events]
    if revisions != list(range(1, len(events) + 1)):
        verdict.lost.append("the history has a gap")
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)
    calls: dict[str, list[Written]] = {each.name: [] for each in written}
    for each in written:
        calls[each.name].append(each)
    forgetful = set(forgetful)
    for name in by_name.keys() | calls.keys():
        history, made = by_name.get(name, []), calls.get(name, [])
        _check_history(verdict, name, history, made, name in forgetful)
    states = {name: _states(history) for name, history in by_name.items()}
    faults = sorted(faults)
    for made in calls.values():
        made.sort(key=lambda each: -each.revision)
    for answer in answers:
        made = calls.get(answer.name, [])
        _check_answer(verdict, answer, states.get(answer.name) or [_NEVER], made, faults)
    return verdict


_NEVER = State(0, math.inf, 0, "")


def _check_history(
    verdict: Verdict, name: str, history: list[Event], written: list[Written], forgets: bool
) -> None:
    """Each acknowledged call is in the history; everything else there is a call's without an
    answer, once each."""
    by_revision = {event.revision: event for event in history}
    explained: set[int] = set()
    for each in written:
        if not each.is_acknowledged:
            continue
        verdict.counts["acknowledged"] += 1
        event = by_revision.get(each.revision)
        if event is None or (event.version, event.digest) != (each.version, each.digest):
            verdict.lost.append(f"{each} is acknowledged, the history has {event}")
        explained.add(each.revision)
    maybe = Counter(each.digest for each in written if not each.is_acknowledged)
    verdict.counts["without an answer"] += maybe.total()
    digests: dict[int, str] = {0: ""}
    for event in history:
        if digests.setdefault(event.version, event.digest) != event.digest:
            verdict.wrong.append(f"{event}: the version was {digests[event.version]}")
        if event.revision in explained:
            continue
        if maybe[event.digest] > 0:
            maybe[event.digest] -= 1
            verdict.counts["happened without an answer"] += 1
        elif not forgets:
            verdict.wrong.append(f"{event}: nobody asked for it")
        else:
            verdict.counts["forgotten"] += 1


def _states(history: Sequence[Event]) -> list[State]:
    ends = [*(event.revision for event in history[1:]), math.inf]
    first = State(0, history[0].revision, 0, "")
    return [first] + [
        State(event.revision, end, event.version, event.digest)
        for event, end in zip(history, ends, strict=True)
    ]


def _check_answer(
    verdict: Verdict,
    answer: Answer,
    states: Sequence[State],
    written: Sequence[Written],
    faults: Sequence[Fault],
) -> None:
    found = [each for each in states if each.version == answer.version]
    if answer.version == 0:
        verdict.counts["answers that the name is gone"] += 1
    elif not answer.is_right:
        verdict.wrong.append(f"{answer}: other tokens than its adapter's")
        return
    elif not found or found[0].digest != answer.digest:
        verdict.wrong.append(f"{answer}: the name never pointed there")
        return
    needed = max(answer.min_revision, seen_at(answer, written, faults))
    if not any(each.until > needed for each in found):
        verdict.stale.append(
            f"{answer}: must be as new as revision {needed}; {found[-1] if found else 'never so'}"
        )
    else:
        if answer.version > 0:
            verdict.counts[f"right by {answer.by}"] += 1
        verdict.counts["held to a revision"] += needed > 0


def seen_at(answer: Answer, written: Sequence[Written], faults: Sequence[Fault]) -> int:
    """Returns the newest revision of the name that must have been seen without being asked for.
    `written` are the name's changes, the newest first, and `faults` are in order."""
    for each in written:
        if each.is_acknowledged and calm_s(each.ended_s, answer.begun_s, faults) > FRESH_S:
            return each.revision
    return 0


def calm_s(begun_s: float, ended_s: float, faults: Sequence[Fault]) -> float:
    """Returns the longest time in between in which nothing was broken. `faults` are in order."""
    longest, since = 0.0, begun_s
    for fault in faults:
        if fault.begun_s >= ended_s:
            break
        longest = max(longest, min(fault.begun_s, ended_s) - since)
        since = max(since, fault.ended_s + RECOVERY_S)
    return max(longest, ended_s - since)


def without_fault(failed: Iterable[Failed], faults: Iterable[Fault]) -> list[str]:
    """Returns the failures, in words, that no fault explains."""
    faults = sorted(faults)
    return [
        f"{each.what}, after {each.calm_s:g} s or more without a fault"
        for each in failed
        if calm_s(each.ended_s - each.calm_s, each.ended_s, faults) >= each.calm_s
    ]
