"""The goal of a scrape is one that can be missed."""

from __future__ import annotations

from typing import Any

from bench.scrape import beyond_goal


def measured(series: int, idle_ms: float) -> dict[str, Any]:
    busy = {"plain": {"median_ms": 500.0}}
    return {"series": series, "idle": {"plain": {"median_ms": idle_ms}}, "under requests": busy}


def test_a_scrape_that_is_slow_or_large_misses_the_goal() -> None:
    assert not beyond_goal({"store": measured(4_999, 50.0)})
    found = {"store": measured(5_000, 1.0), "inference": measured(1, 50.1)}
    assert beyond_goal(found) == ["store: 5000 series", "inference, plain: 50.1 ms"]
