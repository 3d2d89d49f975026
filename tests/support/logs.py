"""What the code under test logs, for tests that read it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from servicekit.telemetry.logs import JsonFormatter


@contextmanager
def captured_log() -> Iterator[io.StringIO]:
    """Collects the log as `--log-format json --log-level debug` writes it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield written
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
