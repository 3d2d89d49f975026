"""Counts by adapter stay bounded, monotonic and complete, whichever are busiest."""

from __future__ import annotations

import random

from inference_svc.metrics.top_adapters import (
    BASE,
    FORMER,
    MAX_MOVES,
    OTHER,
    REVIEW_S,
    AdapterCounts,
    TopAdapters,
)
from tests.support.clock import Clock


def named(busiest: TopAdapters) -> set[str]:
    return set(busiest.rows()) - {BASE, OTHER, FORMER}


def one(tokens: int = 1) -> AdapterCounts:
    return AdapterCounts(1, generated_tokens=tokens)


def test_the_first_are_named_the_rest_are_other() -> None:
    busiest = TopAdapters(2, Clock())
    for adapter in ("t/a", "t/b", "t/c", "t/d", ""):
        busiest.count(adapter, one(10))
    rows = busiest.rows()
    assert {adapter: counts.requests for adapter, counts in rows.items()} == {
        "t/a": 1,
        "t/b": 1,
        BASE: 1,
        OTHER: 2,
        FORMER: 0,
    }
    assert rows[OTHER].generated_tokens == 20


def test_a_busier_adapter_replaces_the_least_busy() -> None:
    clock = Clock()
    busiest = TopAdapters(2, clock)
    for adapter, count in {"t/a": 8, "t/b": 2, "t/new": 6}.items():
        for _ in range(count):
            busiest.count(adapter, one())
    assert named(busiest) == {"t/a", "t/b"}, "it is not time yet"
    clock.now_s += REVIEW_S
    moved = busiest.rows()
    assert moved["t/b"].requests == 2, "what leaves is shown once more"
    assert moved["t/new"].requests == 0, "what comes is shown at 0 first"
    busiest.count("t/new", one())
    after = busiest.rows()
    assert (after["t/new"].requests, after[FORMER].requests, after[OTHER].requests) == (1, 2, 6)
    assert "t/b" not in after


def test_equals_do_not_alternate() -> None:
    clock = Clock()
    busiest = TopAdapters(1, clock)
    for adapter in ("t/a", "t/b"):
        for _ in range(10):
            busiest.count(adapter, one())
    clock.now_s += REVIEW_S
    assert named(busiest) == {"t/a"}


def test_one_old_request_replaces_no_idle_adapter() -> None:
    clock = Clock()
    busiest = TopAdapters(1, clock)
    busiest.count("t/a", one())
    busiest.count("t/b", one())
    clock.now_s += 10 * REVIEW_S
    assert named(busiest) == {"t/a"}


def test_a_returning_adapter_starts_at_0() -> None:
    clock = Clock()
    busiest = TopAdapters(1, clock)

    def make_busiest(adapter: str, count: int) -> None:
        for _ in range(count):
            busiest.count(adapter, one())
        clock.now_s += REVIEW_S
        busiest.rows()

    make_busiest("t/a", 10)
    make_busiest("t/b", 40)
    make_busiest("t/a", 200)
    rows = busiest.rows()
    assert rows["t/a"].requests == 0
    assert rows[FORMER].requests == 10
    assert sum(counts.requests for counts in rows.values()) == 250


def test_no_names_if_none_are_allowed() -> None:
    clock = Clock()
    busiest = TopAdapters(0, clock)
    busiest.count("t/a", one())
    clock.now_s += REVIEW_S
    assert named(busiest) == set()
    assert busiest.rows()[OTHER].requests == 1


def test_sums_never_fall_while_names_change() -> None:
    """Popularity drifts over 3,000 adapters: each minute others are busy."""
    clock, rng = Clock(), random.Random(0)
    busiest = TopAdapters(20, clock)
    total, last_sum, before = 0, 0, busiest.rows()
    seen: set[str] = set()
    for minute in range(60):
        for _ in range(500):
            adapter = f"t/{int(rng.expovariate(0.05)) + 50 * minute}"
            busiest.count(adapter, one(tokens=rng.randrange(10)))
            total += 1
        clock.now_s += REVIEW_S
        rows = busiest.rows()
        assert len(rows) <= 20 + MAX_MOVES + 3
        assert sum(counts.requests for counts in rows.values()) == total
        tokens = sum(counts.generated_tokens for counts in rows.values())
        assert tokens >= last_sum
        for adapter in rows.keys() & before.keys():
            assert rows[adapter].requests >= before[adapter].requests, adapter
        last_sum, before = tokens, rows
        seen |= rows.keys()
    assert len(seen) > 100, "names did change hands"
