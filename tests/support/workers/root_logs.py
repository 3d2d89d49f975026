"""Has pytest capture logs at the root logger alone, as it did before its version 9.1.

It looks at each of the 1,500 loggers of torch and others, six times for each test, for loggers that
pass nothing on to the root. These are torch's and transformers', of which no test reads, and
looking takes a millisecond of each test.
"""

from __future__ import annotations

import logging

import _pytest.logging


class RootLogs:
    """A context that stands in for the one of pytest's plugin."""

    def __init__(self, handler: logging.Handler, level: int | None = None) -> None:
        self._handler = handler
        self._level = level
        self._root = logging.getLogger()
        self._level_before = self._root.level

    def __enter__(self) -> logging.Handler:
        self._root.addHandler(self._handler)
        self._level_before = self._root.level
        if self._level is not None:
            self._handler.setLevel(self._level)
            self._root.setLevel(min(self._level_before, self._level))
        return self._handler

    def __exit__(self, *_: object) -> None:
        if self._level is not None:
            self._root.setLevel(self._level_before)
        self._root.removeHandler(self._handler)


def install() -> None:
    """Holds for this process from now on."""
    _pytest.logging.catching_logs = RootLogs  # type: ignore[misc, assignment]
