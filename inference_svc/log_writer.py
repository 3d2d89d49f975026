"""Writes log lines from a thread of its own: whoever reads standard error and stops to read would
otherwise stop the event loop, and with it every request, at the first line that finds no room."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

STANDARD_ERROR = 2
MAX_WAITING_LINES = 4096
"""What waits beyond these is dropped, and told once there is room again."""
FLUSH_SECONDS = 2.0
"""For what waits when a process ends; a reader that is stuck keeps no process from ending."""


class BackgroundHandler(logging.Handler):
    """Writes to a file descriptor, so that no lock of a stream is held by a write that hangs.
    Each line is one write: up to a few KiB, lines of processes that share a pipe do not mix."""

    def __init__(self, descriptor: int, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_waiting_lines = max_waiting_lines
        self._waiting: deque[bytes] = deque()
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        # A daemon: a write that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits for a reader."""
        try:
            line = self._encode(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) < self._max_waiting_lines:
                self._waiting.append(line)
                self._changed.notify_all()
            else:
                self._num_dropped += 1

    def flush(self) -> None:
        """Returns when all that waits is written, or after FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(self._is_idle, FLUSH_SECONDS)

    def _is_idle(self) -> bool:
        return not self._waiting and not self._is_writing

    def _encode(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _run(self) -> None:
        while True:
            line = self._take()
            try:
                _write_whole(self._descriptor, line)
            except OSError:
                pass  # nobody is left to tell
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _take(self) -> bytes:
        """The next line. What was dropped before it came free is told behind it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))
            self._is_writing = True
            line = self._waiting.popleft()
            num_dropped, self._num_dropped = self._num_dropped, 0
        return line + self._encode(_told(num_dropped)) if num_dropped else line


def _told(num_dropped: int) -> logging.LogRecord:
    facts = {"num_lines": num_dropped, "levelno": logging.WARNING, "levelname": "WARNING"}
    message = "log lines dropped: nobody read them in time"
    return logging.makeLogRecord({"name": __name__, "msg": message, **facts})


def _write_whole(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
