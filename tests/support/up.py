"""`loadout up` in a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support import forks

ROOT = Path(__file__).parents[2]


FORKED = ("-m", "tests.support.forks.cli")
"""The program whose services are forks. A test that looks at processes takes the real one."""


LITTLE_MEMORY = {
    "LOADOUT_INFERENCE_KV_MEMORY": "64MiB",
    "LOADOUT_INFERENCE_ADAPTER_MEMORY": "64MiB",
}
"""Enough for the demo's model and adapters. To fill the usual 768 MiB takes seconds of a core."""


class Up:
    """A running `loadout up`: its addresses, and its commands to try. `program`: what is given to
    `python` in place of the command line's own module. `environment` replaces that of this
    process. FORKED services have LITTLE_MEMORY, if nothing else is said."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        cwd: Path,
        program: tuple[str, ...] = ("-m", "loadout.cli"),
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [python, "-u", *program, "up", *arguments]
        if program is FORKED:
            own = {"PYTHONPATH": str(ROOT), forks.ADDRESS: forks.address()}
            environment = {**LITTLE_MEMORY, **os.environ, **own}
        self.popen = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        lines = []
        for line in self.popen.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                break
        self.output = "\n".join(lines)
        if self.popen.poll() is not None or not lines:
            raise AssertionError(f"loadout up failed: {self.end(signal.SIGTERM)[1]}")
        rows = [line.split() for line in lines]
        store, inference = (
            row[2] for row in rows if row[:2] in (["adapter", "store"], ["inference", "service"])
        )
        store_metrics, inference_metrics = (
            row[2].removeprefix("http://").removesuffix("/metrics")
            for row in rows
            if row[:2] == ["its", "metrics"]
        )
        self.addresses = {
            "store": store,
            "store_metrics": store_metrics,
            "inference": inference,
            "inference_metrics": inference_metrics,
        }
        self.environment = {
            f"LOADOUT_{name.upper()}": address for name, address in self.addresses.items()
        }
        self.commands = [shlex.split(line) for line in lines[lines.index("try:") + 1 : -1]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it as Ctrl-C does, unless it has ended."""
        if self.popen.poll() is None:
            code, stderr = self.end(signal.SIGINT)
            assert code == 0, stderr

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal; (exit code, stderr)."""
        self.popen.send_signal(number)
        try:
            _, stderr = self.popen.communicate(timeout=90)
        finally:
            if self.popen.poll() is None:
                self.popen.kill()
                self.popen.communicate()
        return self.popen.returncode, stderr
