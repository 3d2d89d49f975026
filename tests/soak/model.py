"""What the store has promised, apart from the store: names, versions, labels and their history.

A name is changed by one caller at a time, so what its calls promised is one chain of states. A call
whose answer never came leaves two possibilities, and no third: it happened whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Version:
    digest: str
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class NameState:
    """A name: its live versions, and which of them is current (0: the name is gone)."""

    current: int = 0
    last: int = 0
    live: Mapping[int, Version] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return self.live[self.current].digest if self.current else ""

    def registered(self, digest: str, labels: Labels) -> NameState:
        """New content is a new version; live content of an older version is that version again."""
        known = [number for number, version in self.live.items() if version.digest == digest]
        number = known[0] if known else self.last + 1
        kept = labels or (self.live[number].labels if known else ())
        return self._with(number, {number: Version(digest, kept)}, max(self.last, number))

    def removed(self, number: int = 0) -> NameState:
        """Without one version, or with 0 without any. The newest one left takes over."""
        staying = {n: v for n, v in self.live.items() if number and n != number}
        current = self.current if self.current in staying else max(staying, default=0)
        return replace(self, current=current, live=staying)

    def rolled_back(self, number: int) -> NameState:
        return replace(self, current=number)

    def _with(self, current: int, changed: dict[int, Version], last: int) -> NameState:
        return NameState(current, last, {**self.live, **changed})


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a name's history. `revision` 0: the answer that would tell it never came."""

    kind: str
    version: int
    digest: str
    revision: int = 0


def change(before: NameState, after: NameState, revision: int = 0) -> Change | None:
    """The event that leads from one state to the other. None: nothing changed."""
    if before == after:
        return None
    if after.current == 0:
        return Change("DELETED", 0, before.digest, revision)
    kind = "REGISTERED" if before.current == 0 else "UPDATED"
    return Change(kind, after.current, after.digest, revision)


class NameHistory:
    """One name's chain of states. Used by one thread at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = NameState()
        self.history: list[Change] = []
        self._pending: NameState | None = None

    def begin(self, after: NameState) -> None:
        """A call is about to be sent that leads to `after`."""
        assert self._pending is None, f"{self.name}: two calls at a time"
        self._pending = after

    def refused(self) -> None:
        """The call was answered with an error: nothing may have changed."""
        self._pending = None

    def kept(self, revision: int) -> None:
        """The call returned success."""
        assert self._pending is not None
        self._move(self._pending, revision)

    def settle(self, found: NameState) -> None:
        """After a crash: what the store has now must be one of the possibilities.

        Raises AssertionError naming what was lost or is only half there.
        """
        possible = [self.state] + ([self._pending] if self._pending is not None else [])
        assert found in possible, (
            f"{self.name}: found {found}\n"
            f"promised {self.state}\nor, by a call without an answer, {self._pending}"
        )
        self._move(found, 0)

    def _move(self, state: NameState, revision: int) -> None:
        made = change(self.state, state, revision)
        if made is not None:
            self.history.append(made)
        self.state = state
        self._pending = None


def check_history(histories: list[NameHistory], events: list[Any], newest: int) -> None:
    """`events` (revision, kind, name, version, digest), the whole history of the store, is the one
    that was promised: without gaps up to `newest`, and per name change by change."""
    assert [event.revision for event in events] == list(range(1, newest + 1)), "history has a gap"
    by_name: dict[str, list[Change]] = {}
    for event in events:
        made = Change(event.kind, event.version, event.digest, event.revision)
        by_name.setdefault(event.name, []).append(made)
    for name in histories:
        found = by_name.pop(name.name, [])
        assert len(found) == len(name.history), (
            f"{name.name}: {len(found)} events, {len(name.history)} changes were promised"
        )
        for has, wanted in zip(found, name.history, strict=True):
            expected = replace(wanted, revision=wanted.revision or has.revision)
            assert has == expected, f"{name.name}: the history has {has}, promised {wanted}"
    assert not by_name, f"events of names that nobody registered: {sorted(by_name)}"
