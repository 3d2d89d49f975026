"""One child process of the system: started, waited for, watched, and ended."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
LOG_TAIL_LINES = 15


LAST_WORD = "loadout: "
"""How the line begins in which a part says why it ends."""


class ProcessFailed(Exception):
    """A part of the system died, did not start, or did not stop properly; the message has its
    error, or the end of its log."""


class Process:
    """Runs `command` with its output in `work_dir/<name>.log`.

    It leads a process group of its own: Ctrl-C reaches only us, and we end the parts in order.
    """

    def __init__(self, name: str, command: Sequence[str], work_dir: Path, ready_file: Path) -> None:
        self.name = name
        self.log_path = work_dir / f"{name}.log"
        self.warnings: list[str] = []
        """The warnings of its start, once it serves."""
        self._ready_file = ready_file
        ready_file.unlink(missing_ok=True)
        self._popen = self._begin(command)

    def _begin(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Returns the addresses it serves at, once it does. Raises ProcessFailed."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.check_alive()
            if self._ready_file.exists():
                addresses = json.loads(self._ready_file.read_text())
                self.warnings = addresses.pop("warnings", [])
                return dict(addresses)
            time.sleep(POLL_S)
        raise self._failure(f"was not ready after {timeout_s:.0f} s")

    def check_alive(self) -> None:
        """Raises ProcessFailed if it ended by itself."""
        code = self._popen.poll()
        if code is not None:
            raise self._failure(_ending(code))

    def stop(self, grace_s: float) -> int:
        """Sends SIGTERM, and SIGKILL after the grace or on Ctrl-C; returns the exit code."""
        self._popen.terminate()
        try:
            return self._popen.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._popen.kill()
            return self._popen.wait()

    def failure_of(self, exit_code: int) -> ProcessFailed | None:
        if exit_code == 0:
            return None
        return self._failure(f"stopped with exit code {exit_code} instead of 0")

    def _failure(self, what: str) -> ProcessFailed:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        if lines and lines[-1].startswith(LAST_WORD):
            why = lines[-1].removeprefix(LAST_WORD)
            return ProcessFailed(f"{self.name} {what}: {why}; see the log {self.log_path}")
        tail = "".join(f"\n  {line}" for line in lines) or " empty"
        return ProcessFailed(f"{self.name} {what}; the end of {self.log_path}:{tail}")


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
