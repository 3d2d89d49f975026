from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_what_a_start_made_is_kept_and_later_garbage_is_not() -> None:
    """In a process of its own: here garbage is looked for among two million objects."""
    command = [sys.executable, "-m", "tests.servicekit.garbage_of_a_start"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
