"""Messages of commits give reasons."""

from __future__ import annotations

import pytest

from tools.commit_messages import check, faults


@pytest.mark.parametrize(
    ("message", "files", "expected"),
    [
        ("Mend a thing\n\nIt was broken.\n", ["loadout/client.py"], []),
        ("Words", ["docs/http.md", "tests/test_x.py", "README.md"], []),
        ("Mend a thing\n", ["loadout/client.py"], ["there is no body"]),
        ("x" * 73, ["docs/http.md"], ["the subject has 73 characters"]),
    ],
)
def test_faults_of_a_message(message: str, files: list[str], expected: list[str]) -> None:
    found = list(faults(message, files))
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


@pytest.mark.processes
def test_commits_of_this_history_are_without_fault() -> None:
    assert check() == []
