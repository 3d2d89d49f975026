"""Runs code of the services for commands that need none of them running."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import typer

from loadout.cli.output import CommandFailed

PROGRESS = "progress: "
"""How lines on stderr begin that say how far a command is."""


def run_service_code(module: str, *arguments: str) -> str:
    """Runs a command of a service's module in a process; returns its output. Its progress is shown
    while it runs. Raises CommandFailed."""
    error = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        with subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in map(str.strip, process.stderr):
                if line.startswith(PROGRESS):
                    typer.echo(line.removeprefix(PROGRESS), err=True)
                elif line:
                    error = line
        if process.returncode != 0:
            error = error or f"exit status {process.returncode}"
            raise CommandFailed(error.removeprefix("loadout: "))
        output.seek(0)
        return output.read().strip()
