"""What is counted of a step, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from inference_svc.engine.compute import step_times
from inference_svc.engine.compute.runner import RunTimings
from inference_svc.engine.compute.step_times import StepPhases, StepTimes
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_times.time, "perf_counter", made)
    return made


def test_step_is_computation_and_host_work(clock: Clock) -> None:
    times = StepTimes()
    phases = StepPhases(schedule=0.125, prepare=0.25, forward=1.0, sample=0.5, settle=0.0625)
    with times.measure():
        with times.loading():
            clock.now_s += 0.25
        times.add_load(0.5)
        clock.now_s += 2.0
        times.computed(phases)
    assert times.step.state.sum_seconds == 2.25
    assert times.host.state.sum_seconds == 0.75
    assert times.blocked_by_load.state.sum_seconds == 0.75
    found = {name: state.sum_seconds for name, state in times.phase_states.items()}
    assert found == phases._asdict()


def test_step_without_a_batch_counts_nothing(clock: Clock) -> None:
    times = StepTimes()
    with times.measure(), times.loading():
        clock.now_s += 1.0
    with times.measure():
        times.computed(StepPhases(0.0, 0.0, 0.0, 0.0, 0.0))
    with times.measure():
        pass
    assert sum(times.step.state.counts) == 1
    assert times.blocked_by_load.state.sum_seconds == 0, "an idle step delays no other"


@pytest.mark.parametrize("waits", ["forward", "sample"])
@pytest.mark.parametrize("has_failed", [False, True])
def test_the_time_of_pictures_counts_once(waits: str, has_failed: bool) -> None:
    """Of several ranks, `forward` waits for a device that computes them; otherwise `sample`."""
    timings = RunTimings(prepare=0.25, forward=0.5, sample=0.5)._replace(**{waits: 4.0})
    found = timings.with_pictures(1.0, 3.0, has_failed=has_failed)
    assert getattr(found, waits) == 2.0
    assert (found.of_rows, found.pictures + found.failed_pictures) == (2.75, 3.0)
