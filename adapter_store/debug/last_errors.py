"""The last calls that were refused or failed, for those who look for what is wrong."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

PER_KIND = 20
"""Errors kept of one method and reason: many of a kind push out no others."""
MAX_CHARS = 500


def where(error: BaseException) -> str:
    """A bug by its type and place: its own message may quote anything."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class LastErrors:
    """Methods and reasons are few, and so are the rows. Lives on the event loop."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], deque[tuple[float, dict[str, str]]]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, code: str, facts: Mapping[str, object]) -> None:
        """Keeps what is known of a call that ended with this status: see `call_facts`."""
        told = {"code": code} | {key: str(value)[:MAX_CHARS] for key, value in facts.items()}
        kind = told.get("method", ""), told.get("reason", "")
        self._counts[kind] += 1
        self._rows.setdefault(kind, deque(maxlen=PER_KIND)).append((time.time(), told))

    def describe(self) -> dict[str, Any]:
        """The newest first, and how many there were in all."""
        rows = sorted(
            (row for kind in self._rows.values() for row in kind), key=lambda row: -row[0]
        )
        counts = [
            {"method": method, "reason": reason, "count": count}
            for (method, reason), count in self._counts.most_common()
        ]
        return {"counts": counts, "errors": [{"time": _time(at)} | told for at, told in rows]}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
