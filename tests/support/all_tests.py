"""The names of all tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def all_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return found
