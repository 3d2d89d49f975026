"""The prefetch policy, over any traffic and any sizes; no device, no store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.adapters.prefetch import (
    BACKOFF_S,
    BURST_S,
    CHECK_INTERVAL_S,
    INITIAL_RATE,
    MARGIN,
    SHARE,
    ByteBudget,
    PrefetchPolicy,
)

MB = 1_000_000


def ask(prefetch: PrefetchPolicy, digest: str, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        prefetch.on_request(digest, now_s)


def nothing_is_here(digest: str) -> bool:
    return False


def free_room() -> None:
    """Nothing would be evicted."""


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500 * MB)), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
)
def test_budget_bounds_every_window(moments: list[tuple[float, int]], share: float) -> None:
    """Takes whenever the budget allows; sizes are known only afterwards."""
    budget, now_s, rate = ByteBudget(share, rate=100.0 * MB), 5.0, 100.0 * MB
    taken: list[tuple[float, int]] = []
    for gap_s, num_bytes in moments:
        now_s += gap_s
        if budget.wait_s(now_s) == 0:
            budget.take(num_bytes, now_s)
            taken.append((now_s, num_bytes))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window_s = taken[last][0] - taken[first][0]
            total = sum(num_bytes for _, num_bytes in taken[first:last])
            assert total <= share * rate * (window_s + BURST_S) * (1 + 1e-9)


def test_debt_delays() -> None:
    budget = ByteBudget(0.5, rate=100.0)
    assert budget.wait_s(0.0) == 0
    budget.take(200, 0.0)
    assert budget.wait_s(1.0) == pytest.approx(3.0)
    assert budget.wait_s(4.0) == 0


def test_rate_follows_measurements() -> None:
    budget = ByteBudget()
    assert budget.rate == INITIAL_RATE
    for _ in range(50):
        budget.record_pull(10 * MB, 0.01)
    assert budget.rate == pytest.approx(1e9, rel=0.01)
    budget.record_pull(0, 1.0)
    budget.record_pull(5, 0.0)
    assert budget.rate == pytest.approx(1e9, rel=0.01)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 20), min_size=1),
    st.sets(st.sampled_from("abcdefgh")),
    st.sampled_from("abcdefgh"),
)
def test_chooses_the_most_popular_absent(
    counts: dict[str, int], here: set[str], coldest: str
) -> None:
    prefetch = PrefetchPolicy()
    for digest, count in counts.items():
        ask(prefetch, digest, count)
    chosen = prefetch.choose(CHECK_INTERVAL_S, here.__contains__, lambda: {coldest})
    absent = {digest: count for digest, count in counts.items() if digest not in here}
    best = max(absent.values(), default=0)
    # Just at the margin rounding may decide.
    if best * 0.999 >= MARGIN * counts.get(coldest, 0) and absent:
        assert chosen is not None
        assert absent[chosen] == best
    elif best * 1.001 < MARGIN * counts.get(coldest, 0) or not absent:
        assert chosen is None


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 20), min_size=1),
    st.sampled_from("abcdefgh"),
)
def test_hotter_than_protects_the_popular(counts: dict[str, int], digest: str) -> None:
    prefetch = PrefetchPolicy()
    for other, count in counts.items():
        ask(prefetch, other, count)
    kept = prefetch.hotter_than(digest, set("abcdefgh"), 1.0)
    own = counts.get(digest, 0)
    for other in set("abcdefgh") - {digest}:
        if other not in kept:
            assert counts.get(other, 0) * MARGIN <= own * (1 + 1e-9)


def test_one_at_a_time_within_budget() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "a", 3)
    ask(prefetch, "b", 2)
    now_s = CHECK_INTERVAL_S
    assert prefetch.choose(0.0, nothing_is_here, free_room) is None, "not at every request"
    assert prefetch.next_check_s() == now_s
    assert prefetch.choose(now_s, nothing_is_here, free_room) == "a"
    assert prefetch.choose(now_s, nothing_is_here, free_room) is None
    assert prefetch.next_check_s() is None
    size = int(SHARE * INITIAL_RATE * (BURST_S + 2))
    prefetch.on_opened(size, now_s)
    prefetch.on_pulled(now_s)
    assert prefetch.choose(now_s, {"a"}.__contains__, free_room) is None, "the share is used up"
    later_s = prefetch.next_check_s()
    assert later_s is not None
    assert prefetch.choose(later_s + 0.001, {"a"}.__contains__, free_room) == "b"


def test_faded_traffic_is_not_prefetched() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "a", 1)
    assert prefetch.choose(3600.0, nothing_is_here, free_room) is None
    assert prefetch.next_check_s() is None


def test_refused_backs_off() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "a", 3)
    assert prefetch.choose(CHECK_INTERVAL_S, nothing_is_here, free_room) == "a"
    prefetch.on_refused(CHECK_INTERVAL_S)
    assert prefetch.choose(CHECK_INTERVAL_S, nothing_is_here, free_room) is None
    assert prefetch.next_check_s() == CHECK_INTERVAL_S + BACKOFF_S
    assert prefetch.choose(CHECK_INTERVAL_S + BACKOFF_S, nothing_is_here, free_room) == "a"


def test_forgotten_is_not_prefetched() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "a", 3)
    prefetch.forget("a")
    assert prefetch.choose(CHECK_INTERVAL_S, nothing_is_here, free_room) is None


def test_nothing_is_chosen_without_candidates() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "a", 3)
    assert prefetch.choose(CHECK_INTERVAL_S, nothing_is_here, frozenset) is None


def test_counters() -> None:
    prefetch = PrefetchPolicy()
    counters = prefetch.counters
    for digest in ("found", "left", "failed", "late", "early"):
        ask(prefetch, digest, 3)
    prefetched: list[str] = []
    now_s = 0.0
    while len(prefetched) < 5:
        now_s += 1.0
        digest = prefetch.choose(now_s, prefetched.__contains__, free_room)
        assert digest is not None
        prefetched.append(digest)
        if digest == "early":
            prefetch.on_request(digest, now_s)  # before a byte came: an ordinary pull
            continue
        prefetch.on_opened(10, now_s)
        if digest == "late":
            prefetch.on_request(digest, now_s)
        elif digest == "failed":
            prefetch.on_refused(now_s)
        else:
            prefetch.on_pulled(now_s)
    ask(prefetch, "found", 2)
    prefetch.on_evicted("left")
    prefetch.on_evicted("found")
    assert (counters.prefetched, counters.prefetched_bytes) == (4, 40)
    assert counters.hits == 2
    assert counters.wasted_bytes == 20
    assert prefetch.unused == {}


def test_new_version_is_prefetched() -> None:
    prefetch = PrefetchPolicy()
    ask(prefetch, "v1", 3)
    assert prefetch.choose(CHECK_INTERVAL_S, {"v1"}.__contains__, free_room) is None
    assert prefetch.next_check_s() is None
    prefetch.on_repointed("v1", "v2", 1.0)
    assert prefetch.choose(1.0 + CHECK_INTERVAL_S, {"v1"}.__contains__, lambda: {"v1"}) is None, (
        "as popular as v1"
    )
    prefetch.on_repointed("v1", "v2", 2.0)
    assert prefetch.choose(2.0 + CHECK_INTERVAL_S, {"v1"}.__contains__, free_room) == "v2"
