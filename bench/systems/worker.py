"""A process that answers line by line, and is idle while others are measured."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

REST_POLL_S = 0.05
REST_SHARE = 0.1
REST_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 20


class WorkerFailed(Exception):
    """A worker raised or died; the message has its error, or the end of its log."""


class Worker:
    """A process with one JSON object per line on its standard input and output.

    A reply is `{"result": ...}` or `{"error": text}`. Standard error goes to `log_path`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._log_path = log_path
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=folder,
                text=True,
            )

    def ask(self, action: str, **values: Any) -> Any:
        """Returns the reply's result. Raises WorkerFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"action": action, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise WorkerFailed(f"{self.name} died:\n" + "\n".join(tail))
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(f"{self.name}: {reply['error']}")
        return reply["result"]

    def wait_for_rest(self) -> None:
        """Waits until the process is idle. Raises WorkerFailed if it stays busy.

        OpenMP's threads spin for a while, and some forever.
        """
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        before_s = self._processor_seconds()
        while time.monotonic() < deadline_s:
            time.sleep(REST_POLL_S)
            now_s = self._processor_seconds()
            if now_s - before_s < REST_POLL_S * REST_SHARE:
                return
            before_s = now_s
        raise WorkerFailed(f"{self.name} keeps the processor busy while it has nothing to do")

    def _processor_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        seconds = 0.0
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                seconds += times.user + times.system
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
