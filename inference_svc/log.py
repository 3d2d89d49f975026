"""Log lines on standard error: one line per event, as JSON or as text.

Facts go into `extra={...}`, so that both forms carry them by name. What looks like a secret is
hidden in either form, whoever logged it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from inference_svc.log_writer import STANDARD_ERROR, BackgroundHandler
from inference_svc.scrub import may_hold_secret, scrubbed, scrubbed_tree
from inference_svc.spans import log_facts

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\x21\x23-\x7e]+")
"""Values that need no quotes: no spaces, no line ends, no quotes themselves."""


def _facts(record: logging.LogRecord) -> dict[str, object]:
    """With those of the trace that it is logged in, if there is one."""
    facts = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return facts | log_facts()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Formatter(logging.Formatter):
    """Hides secrets. Few lines look as if they had any, and requests wait for the rest."""

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record, str)
        return self._line(record, scrubbed) if may_hold_secret(line) else line

    def _line(self, record: logging.LogRecord, scrub: Callable[[str], str]) -> str:
        """`scrub` gets all text before it is quoted, which would hide a secret from it."""
        raise NotImplementedError


class JsonFormatter(_Formatter):
    """One object per line: time, level, logger, message, the facts, and a traceback if any."""

    def _line(self, record: logging.LogRecord, scrub: Callable[[str], str]) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(scrubbed_tree(line, scrub))


class TextFormatter(_Formatter):
    """The same for people: facts follow the message as key=value."""

    def _line(self, record: logging.LogRecord, scrub: Callable[[str], str]) -> str:
        known = scrubbed_tree(_facts(record), scrub)
        facts = "".join(f" {key}={_quoted(value)}" for key, value in known.items())
        message = scrub(record.getMessage())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}{facts}"
        if record.exc_info:
            line += "\n" + scrub(self.formatException(record.exc_info))
        return line


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def configure_logging(log_format: Literal["text", "json"], level: str) -> None:
    """Replaces the root logger's handlers; call it once, at start."""
    handler = BackgroundHandler(STANDARD_ERROR)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
