"""Logging: one line per event, as JSON or as text, through the standard library.

Facts go into `extra={...}`, so that both forms carry them by name.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

_CLIENTS = (
    *("boto3", "botocore", "urllib3", "s3transfer"),
    *("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2"),
)

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_logging(log_format: LogFormat, level: str) -> None:
    """Sends everything at `level` and above to standard error; replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # These log request headers, signed URLs and credentials lookups below WARNING; alembic, which
    # plugins it has.
    for noisy in (*_CLIENTS, "alembic"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
