"""Observations fall into the right buckets, alone and many at a time."""

from __future__ import annotations

import itertools

import pytest

from servicekit.telemetry.histogram import (
    IDLE_BOUNDS_S,
    REQUEST_BOUNDS_S,
    STEP_BOUNDS_S,
    Histogram,
)


@pytest.mark.parametrize("bounds", [STEP_BOUNDS_S, REQUEST_BOUNDS_S, IDLE_BOUNDS_S])
def test_observations_are_in_the_right_bucket(
    bounds: tuple[float, ...],
) -> None:
    assert all(low < high for low, high in itertools.pairwise(bounds))
    for index, bound in enumerate(bounds):
        for seconds, expected in ((bound, index), (bound * 1.001, index + 1)):
            histogram = Histogram(bounds)
            histogram.observe(seconds)
            assert histogram.state.counts.index(1) == expected


def test_many_at_once_equal_many_single_ones() -> None:
    together, single = Histogram(), Histogram()
    together.observe(0.25, 64)
    for _ in range(64):
        single.observe(0.25)
    assert together.state == single.state
