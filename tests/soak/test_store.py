"""Some kills of the crash test; `make soak` has two hundred over each catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.model import NameHistory, NameState, Version, check_history
from tests.support import forks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("catalog", "kills"),
    [
        ("sqlite", 2),
        pytest.param("postgresql", 1, marks=pytest.mark.long),
        pytest.param("sqlite", 25, marks=pytest.mark.long),
        pytest.param("postgresql", 12, marks=pytest.mark.long),
    ],
)
def test_a_killed_store_keeps_its_promises(catalog, kills, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    done = forks.run("tests.soak.store", f"--kills={kills}", "--catalog", catalog)
    assert done.returncode == 0, done.stdout + done.stderr  # with the seed
    assert "every promise was kept" in done.stdout


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
