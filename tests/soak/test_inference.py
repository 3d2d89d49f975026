"""Some seconds of the engine's endurance test; `make soak` has ten minutes of it."""

from __future__ import annotations

import pytest

from bench.engine import Track
from bench.models import prepare
from inference_svc.core import FinishReason
from inference_svc.errors import AdapterUnavailable, QueueFull
from tests.soak.inference import NUM_SAMPLES, Asked, Soak, soak


def test_an_engine_under_cancels_and_deadlines_holds_nothing(tmp_path) -> None:
    done = soak(prepare("bench-tiny", 1, tmp_path), num_adapters=60, seconds=3, seed=5, threads=0)
    assert " 0 requests" not in f" {done}"


@pytest.mark.parametrize(
    ("asked", "is_wrong"),
    [
        (Asked(Track(0.0, finish_reason=FinishReason.ABORTED), 4, False), True),
        (Asked(Track(0.0, finish_reason=FinishReason.ABORTED), 4, True), False),
        (Asked(Track(0.0, finish_reason=FinishReason.ABORTED), 4, False, True), False),
        (Asked(Track(0.0, error=QueueFull("full")), 4, False), True),
        (Asked(Track(0.0, error=QueueFull("full")), 4, True), False),
        (Asked(Track(0.0, error=AdapterUnavailable("late")), 4, True), True),
        (Asked(Track(0.0, 3, finish_reason=FinishReason.LENGTH), 4, False), True),
        (Asked(Track(0.0, 4, finish_reason=FinishReason.LENGTH), 4, False), False),
    ],
)
def test_an_end_that_nobody_asked_for_is_seen(asked, is_wrong) -> None:
    if is_wrong:
        with pytest.raises(AssertionError):
            asked.check()
    else:
        asked.check()


def test_memory_that_grows_is_seen() -> None:
    soak = Soak(None, [], 512, 0)
    soak.samples = [(1 << 30) + (index << 20) for index in range(NUM_SAMPLES)]
    with pytest.raises(AssertionError, match="resident memory"):
        soak.check_memory()
    soak.samples = [1 << 30] * NUM_SAMPLES
    soak.check_memory()
