"""Logs to standard error: one line per event, as JSON or as text.

Fields go into `extra={...}`, so that both formats carry them by name. Everything that looks like a
secret is hidden in both formats. A background thread writes the lines: a reader of standard error
that stalls would otherwise block the event loop, and every request, once the pipe is full.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from servicekit.telemetry.redact import may_hold_secret, redact, redact_tree
from servicekit.telemetry.spans import log_fields

LogFormat: TypeAlias = Literal["text", "json"]

STANDARD_ERROR = 2
MAX_QUEUED_LINES = 4096
"""Further lines are dropped; their number is logged once there is space again."""
FLUSH_SECONDS = 2.0
"""Bounds how long a process that ends waits for a stalled reader."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_of_process: dict[str, object] = {}
"""Fields of all lines of this process; see `mark_process`."""
_PLAIN = re.compile(r"[\x21\x23-\x7e]+")
"""Matches values that need no quotes."""


def configure_logging(log_format: LogFormat, level: str, noisy_loggers: Iterable[str] = ()) -> None:
    """Replaces the root logger's handlers. `level` is a name in any case; loggers in
    `noisy_loggers` and below log nothing under WARNING."""
    handler = BackgroundHandler(STANDARD_ERROR)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    least = max(logging.WARNING, logging.getLogger().level)
    for name in noisy_loggers:
        logging.getLogger(name).setLevel(least)


def mark_process(**fields: object) -> None:
    """Adds fields to all further lines of this process, such as rank=1: for one of several that
    write to one place. In text they come before the message, as [rank 1]."""
    _of_process.update(fields)


class _Formatter(logging.Formatter):
    """Hides secrets. Most lines are formatted once: few contain anything like a secret."""

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record, str)
        return self._line(record, redact) if may_hold_secret(line) else line

    def _line(self, record: logging.LogRecord, redact_text: Callable[[str], str]) -> str:
        """Applies `redact_text` to all text before quoting, which would hide a secret from it."""
        raise NotImplementedError


class JsonFormatter(_Formatter):
    """Formats a record as one object: time, level, logger, message, fields, exception if any."""

    def _line(self, record: logging.LogRecord, redact_text: Callable[[str], str]) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_of_process,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(redact_tree(line, redact_text))


class TextFormatter(_Formatter):
    """Formats a record for people: fields follow the message as key=value."""

    def _line(self, record: logging.LogRecord, redact_text: Callable[[str], str]) -> str:
        named = redact_tree(_fields(record), redact_text)
        fields = "".join(f" {key}={_quoted(value)}" for key, value in named.items())
        message = redact_text(record.getMessage())
        marks = "".join(f"[{key} {value}] " for key, value in _of_process.items())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {marks}{message}{fields}"
        if record.exc_info:
            line += "\n" + redact_text(self.formatException(record.exc_info))
        return line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields passed as `extra`, and the current trace's, if any."""
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return fields | log_fields()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class BackgroundHandler(logging.Handler):
    """Writes to a file descriptor from a thread, so that a write that hangs holds no stream's lock.
    Each line is one write: up to a few KiB, lines of processes that share a pipe do not mix."""

    def __init__(self, descriptor: int, max_queued_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_queued_lines = max_queued_lines
        self._queued: deque[bytes] = deque()
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        # A daemon: a write that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the line; never blocks on the reader."""
        try:
            line = self._encode(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._queued) < self._max_queued_lines:
                self._queued.append(line)
                self._changed.notify_all()
            else:
                self._num_dropped += 1

    def flush(self) -> None:
        """Returns when all queued lines are written, or after FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(self._is_idle, FLUSH_SECONDS)

    def _is_idle(self) -> bool:
        return not self._queued and not self._is_writing

    def _encode(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _run(self) -> None:
        while True:
            line = self._take()
            try:
                _write_all(self._descriptor, line)
            except OSError:
                pass  # nowhere left to report it
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _take(self) -> bytes:
        """Returns the next line, followed by a report of the lines dropped before it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queued))
            self._is_writing = True
            line = self._queued.popleft()
            num_dropped, self._num_dropped = self._num_dropped, 0
        return line + self._encode(_drop_report(num_dropped)) if num_dropped else line


def _drop_report(num_dropped: int) -> logging.LogRecord:
    fields = {"num_lines": num_dropped, "levelno": logging.WARNING, "levelname": "WARNING"}
    message = "log lines dropped: nobody read them in time"
    return logging.makeLogRecord({"name": __name__, "msg": message, **fields})


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
