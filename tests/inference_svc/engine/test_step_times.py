"""What is counted of a step, by a clock that the test moves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from inference_svc.engine import step_times
from inference_svc.engine.step_times import Histogram, StepTimes


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_times.time, "perf_counter", made)
    return made


def test_a_step_is_computation_and_what_is_around_it(clock: Clock) -> None:
    times = StepTimes()
    times.begin()
    with times.loading():
        clock.now_s += 0.25
    times.changed(0.5)
    clock.now_s += 2.0
    times.computed(1.5)
    times.end()
    assert times.step.state.sum_seconds == 2.25
    assert times.host.state.sum_seconds == 0.75
    assert times.blocked_by_load.state.sum_seconds == 0.75


def test_a_turn_without_a_step_counts_nothing(clock: Clock) -> None:
    times = StepTimes()
    times.begin()
    with times.loading():
        clock.now_s += 1.0
    times.end()
    times.begin()
    times.computed(0.0)
    times.end()
    times.end()
    assert sum(times.step.state.counts) == 1
    assert times.blocked_by_load.state.sum_seconds == 0, "an idle turn delays no step"


def test_every_observation_is_in_the_bucket_of_the_first_bound_that_holds_it() -> None:
    bounds = Histogram().state.bounds
    assert all(low < high for low, high in itertools.pairwise(bounds))
    for index, bound in enumerate(bounds):
        for seconds, expected in ((bound, index), (bound * 1.001, index + 1)):
            histogram = Histogram()
            histogram.observe(seconds)
            assert histogram.state.counts.index(1) == expected
