"""Two checkouts compared."""

from __future__ import annotations

from bench.turns import summarize


def test_summary_has_the_spread_of_the_baseline() -> None:
    found = {
        "base, tokens/s": {
            "baseline": [100.0, 300.0, 200.0],
            "baseline again": [110.0, 250.0, 240.0],
            "this": [230.0, 190.0, 220.0],
        }
    }
    assert summarize(found) == {
        "base, tokens/s": {
            "baseline": 220.0,
            "this": 220.0,
            "this / baseline": 1.0,
            "baseline / itself": 200.0 / 240.0,
        }
    }
