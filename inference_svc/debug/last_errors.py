"""The last calls that were refused or failed, for those who look for what is wrong."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from servicekit.errors import ServiceError

PER_KIND = 20
"""Errors kept of one method and reason: many of a kind push out no others."""
MAX_CHARS = 500
PROMPT_SUBJECTS = ("chat", "messages")
"""What is said of these may quote the prompt."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended: its `code` is a status' name, or a number over HTTP. `reason` and `message`
    are the error's, "" where there was none."""

    method: str
    code: str
    reason: str = ""
    message: str = ""
    request_id: str = ""
    time_s: float = 0.0

    @classmethod
    def of(cls, method: str, code: str, error: Exception | None, request_id: str = "") -> CallEnd:
        """Now."""
        reason, message = "", ""
        if isinstance(error, ServiceError):
            quotes_prompt = error.subject in PROMPT_SUBJECTS
            reason, message = error.reason, "" if quotes_prompt else error.message
        elif error is not None:
            reason, message = "INTERNAL", where(error)
        return cls(method, code, reason, message[:MAX_CHARS], request_id[:MAX_CHARS], time.time())


def where(error: BaseException) -> str:
    """A bug by its type and place: its own message may quote anything."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class LastErrors:
    """Methods and reasons are few, and so are the rows. Lives on the event loop."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], deque[CallEnd]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, end: CallEnd) -> None:
        """Keeps it if it has a reason."""
        if end.reason:
            kind = end.method, end.reason
            self._counts[kind] += 1
            self._rows.setdefault(kind, deque(maxlen=PER_KIND)).append(end)

    def describe(self) -> dict[str, Any]:
        """The newest first, and how many there were in all."""
        rows = sorted((r for kind in self._rows.values() for r in kind), key=lambda r: -r.time_s)
        counts = [
            {"method": method, "reason": reason, "count": count}
            for (method, reason), count in self._counts.most_common()
        ]
        return {"counts": counts, "errors": [_row(each) for each in rows]}


def _row(end: CallEnd) -> dict[str, Any]:
    facts = asdict(end)
    time_s = facts.pop("time_s")
    return {"time": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")} | facts
