"""Some kills of the crash test; `make soak` has two hundred over each catalog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.model import NameHistory, NameState, Version, check_history

ROOT = Path(__file__).parents[2]


LONG = [
    pytest.param([catalog], kills, marks=pytest.mark.long)
    for catalog, kills in (("sqlite", 25), ("postgresql", 12))
]


# Both in one process: it imports what a store is made of, and so does what its stores are forks of.
@pytest.mark.parametrize(("catalogs", "kills"), [(["sqlite", "postgresql"], 2), *LONG])
def test_a_killed_store_keeps_its_promises(catalogs, kills) -> None:
    # In a process of its own: the soak forks, and this one has threads.
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.store", f"--kills={kills}", "--catalog", *catalogs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # with the seed
    assert done.stdout.count("every promise was kept") == len(catalogs)


def test_a_call_without_an_answer_happened_or_not() -> None:
    for happened in (True, False):
        history = NameHistory("team/name")
        after = history.state.registered("sha256:a", (("k", "v"),))
        history.begin(after)
        history.settle(after if happened else NameState())
        assert history.state.current == happened
        assert len(history.history) == happened


def test_what_is_lost_or_half_there_is_seen() -> None:
    history = NameHistory("team/name")
    history.begin(history.state.registered("sha256:a", ()))
    history.kept(1)
    with pytest.raises(AssertionError, match="team/name"):
        history.settle(NameState())
    history.begin(history.state.registered("sha256:b", (("k", "v"),)))
    half = {1: Version("sha256:a"), 2: Version("sha256:b")}  # without its labels
    with pytest.raises(AssertionError, match="team/name"):
        history.settle(NameState(2, 2, half))


def test_a_gap_in_the_history_is_seen() -> None:
    with pytest.raises(AssertionError, match="gap"):
        check_history([], [], 1)
