"""Reads this checkout's history with git."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments: str) -> str:
    """Returns the output of a git command in this checkout. Raises CalledProcessError."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def message_of(commit: str) -> str:
    """Returns a commit's message. Raises CalledProcessError."""
    return git("log", "-1", "--format=%B", commit)
