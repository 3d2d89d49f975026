"""Runs code of the services for commands that need none of them running."""

from __future__ import annotations

import subprocess
import sys

from loadout.cli.output import CommandFailed


def run_service_code(module: str, *arguments: str) -> str:
    """Runs a command of a service's module in a process; returns what it prints. Raises
    CommandFailed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CommandFailed(lines[-1].removeprefix("loadout: "))
    return done.stdout.strip()
