"""A child process that reads hostile files: without secrets, and ended when its time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
POLL_SECONDS = 0.1


class ChildFailure(Exception):
    """A child that did not end by itself with exit code 0. `is_timeout`: it took too long."""

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout


def run_child(
    command: Sequence[str], work: Path, wall_seconds: float, check_cancelled: Callable[[], None]
) -> None:
    """Runs a program in folder `work`, which sets its own limits of memory and CPU time.
    `check_cancelled` is called periodically and may raise. Raises ChildFailure."""
    deadline = time.monotonic() + wall_seconds
    child = subprocess.Popen(
        command,
        cwd=work,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while True:
            try:
                code = child.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                check_cancelled()
            if time.monotonic() > deadline:
                raise ChildFailure(f"over {wall_seconds:g} s", is_timeout=True)
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == -signal.SIGXCPU:
        raise ChildFailure("more CPU time than it may take", is_timeout=True)
    if code != 0:
        raise ChildFailure(f"signal {-code}" if code < 0 else f"exit code {code}")
