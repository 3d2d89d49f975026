"""Keeps the calls that were refused or failed most recently, for the debug bundle."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple

from servicekit.errors import ServiceError

MAX_PER_KIND = 20
"""Limit per method and reason, so that many of one kind displace no others."""
MAX_CHARS = 500
"""Longer texts of callers are cut."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Describes how a call ended: `code` is a gRPC status's name or an HTTP status; `reason` and
    `message` are the error's, "" without one; `facts` are further facts about the call."""

    method: str
    code: str
    reason: str = ""
    message: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        method: str,
        code: str,
        error: Exception | None,
        facts: Mapping[str, str],
        seconds: float = 0.0,
        private_subjects: Collection[str] = (),
    ) -> CallEnd:
        """Leaves out messages about `private_subjects` and their parts, which could quote the
        caller's data."""
        reason, message = "", ""
        if isinstance(error, ServiceError):
            is_private = error.subject.partition("[")[0] in private_subjects
            reason, message = error.reason, "" if is_private else error.message
        elif error is not None:
            reason, message = "INTERNAL", describe_bug(error)
        return cls(method, code, reason, message[:MAX_CHARS], facts, seconds)


def describe_bug(error: BaseException) -> str:
    """Returns an error's type and place: its own message could quote anything."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class _Entry(NamedTuple):
    number: int
    time_s: float
    fields: dict[str, str]


class RecentErrors:
    """Keeps calls by method and reason, of which there are few. Lives on the event loop."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], deque[_Entry]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._numbers = count()

    def add(self, end: CallEnd) -> None:
        """Adds a call if it ended with an error."""
        if not end.reason:
            return
        kind = end.method, end.reason
        own = {"method": end.method, "code": end.code, "reason": end.reason, "message": end.message}
        texts = own | {key: value[:MAX_CHARS] for key, value in end.facts.items()}
        entry = _Entry(next(self._numbers), time.time(), texts)
        self._counts[kind] += 1
        self._entries.setdefault(kind, deque(maxlen=MAX_PER_KIND)).append(entry)

    def describe(self) -> dict[str, Any]:
        """Returns the entries, newest first, and the number of all calls by kind."""
        newest_first = sorted((e for kind in self._entries.values() for e in kind), reverse=True)
        counts = [
            {"method": method, "reason": reason, "count": number}
            for (method, reason), number in self._counts.most_common()
        ]
        errors = [{"time": format_time(entry.time_s)} | entry.fields for entry in newest_first]
        return {"counts": counts, "errors": errors}


def format_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
