"""Popularity against its definition, over any traffic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.adapters.popularity import Popularity

HALF_LIFE_S = 10.0
DIGESTS = "abcde"
requests = st.lists(
    st.tuples(st.sampled_from(DIGESTS), st.floats(0, 1e5, allow_subnormal=False)), max_size=40
)


def observed(traffic: list[tuple[str, float]], **options: int) -> tuple[Popularity, float]:
    """Popularity after `traffic`, given as gaps between requests, and the moment of the last."""
    popularity, now_s = Popularity(HALF_LIFE_S, **options), 1e6
    for digest, gap_s in traffic:
        now_s += gap_s
        popularity.record(digest, now_s)
    return popularity, now_s


@given(requests, st.floats(0, 100))
def test_score_halves_after_a_half_life(traffic: list[tuple[str, float]], later_s: float) -> None:
    popularity, end_s = observed(traffic)
    ages_s, age_s = {digest: [] for digest in DIGESTS}, 0.0
    for digest, gap_s in reversed(traffic):
        ages_s[digest].append(age_s)
        age_s += gap_s
    for digest, ages in ages_s.items():
        expected = sum(0.5 ** ((age + later_s) / HALF_LIFE_S) for age in ages)
        found = popularity.score(digest, end_s + later_s)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(requests, st.floats(0, 1e4))
def test_order_does_not_change_with_time(traffic: list[tuple[str, float]], later_s: float) -> None:
    popularity, end_s = observed(traffic)
    before = ranking(popularity, end_s)
    after = ranking(popularity, end_s + later_s)
    assert before[: len(after)] == after, "what has all but vanished is forgotten"
    scores = [popularity.score(digest, end_s) for digest in before]
    assert scores == sorted(scores, reverse=True)


def ranking(popularity: Popularity, now_s: float) -> list[str]:
    found: list[str] = []
    while (hottest := popularity.hottest(now_s, lambda digest: digest not in found)) is not None:
        found.append(hottest[0])
    return found


def test_only_eligible_are_found() -> None:
    popularity, now_s = observed([("a", 0), ("a", 0), ("b", 0), ("c", 0), ("c", 0), ("c", 0)])
    found = popularity.hottest(now_s, lambda digest: digest != "c", 2.0)
    assert found == ("a", pytest.approx(2.0))
    assert popularity.hottest(now_s, lambda digest: digest != "c", 2.1) is None


def test_search_checks_only_leaders() -> None:
    """The check is what costs: a search runs in the engine's thread, up to four times a second."""
    popularity = Popularity(HALF_LIFE_S)
    for number in range(4000):
        popularity.record(str(number), number // 40 * 0.01)
    popularity.record("hot", 1.0)
    popularity.record("hot", 1.0)
    checked: list[str] = []
    found = popularity.hottest(1.0, lambda digest: bool(checked.append(digest) or digest != "hot"))
    assert found is not None
    assert found[1] == pytest.approx(0.5 ** (0.01 / HALF_LIFE_S))
    assert len(checked) < 200
    checked.clear()
    popularity.hottest(1.0, lambda digest: bool(checked.append(digest) or True), least=1.5)
    assert checked == ["hot"]


def test_least_popular_are_dropped() -> None:
    popularity = Popularity(HALF_LIFE_S, max_tracked=8)
    for number in range(100):
        for _ in range(1 + (number < 4)):
            popularity.record(str(number), 0.0)
    assert len(popularity) <= 8
    assert all(popularity.score(str(number), 0.0) == 2.0 for number in range(4))


def test_new_version_inherits() -> None:
    popularity, now_s = observed([("old", 0), ("old", 0), ("other", 0)])
    popularity.inherit("new", "old")
    assert popularity.score("new", now_s) == popularity.score("old", now_s) == 2.0
    popularity.inherit("old", "other")
    assert popularity.score("old", now_s) == 2.0, "back to what it was: nothing is lost"
