"""Rank 0's backend keeps in step with the other ranks, whatever becomes of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.backends.slot_runs import SlotRuns
from inference_svc.backends.step_data import ScoredSlice, StepData
from inference_svc.engine.ranks.backend import RankedBackend, RankedInputs
from inference_svc.errors import EngineFailed

STEP = StepData(
    [5], [0], [1], [[0]], SlotRuns([-1], [1]), [-1], [ScoredSlice([0], SlotRuns([-1], [1]))] * 3
)


class Recorded:
    """A backend of rank 0 and the group of the others, which write down their exchanges."""

    failure: EngineFailed | None = None
    count = 2

    def __init__(self) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None

    def send_step(self, buffer: bytes) -> None:
        self.events.append("sent")

    def blame(self, error: Exception) -> EngineFailed:
        self.failure = EngineFailed.because(f"rank 1: {error}")
        return self.failure

    def forward(self, inputs: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.events.append("computed")
        return "logits"

    def score(self, inputs: Any) -> Iterator[Any]:
        for part in range(len(STEP.scored)):
            self.events.append(f"scored {part}")
            yield part


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def backend(recorded: Recorded) -> RankedBackend:
    own: Any = recorded
    return RankedBackend(own, own, max_scored=8)


INPUTS = RankedInputs(None, STEP)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_scores_that_nobody_reads_are_exchanged_before_the_next_step(
    num_read: int, recorded: Recorded, backend: RankedBackend
) -> None:
    """The sampler may fail before it has read them, and the rows are computed again."""
    backend.forward(INPUTS)
    scores = backend.score(INPUTS)
    for _ in range(num_read):
        next(scores)
    del scores
    backend.forward(INPUTS)
    step = ["sent", "computed"]
    assert recorded.events == [*step, "scored 0", "scored 1", "scored 2", *step]


def test_after_an_error_in_a_step_nothing_is_computed(
    recorded: Recorded, backend: RankedBackend
) -> None:
    recorded.error = ExchangeFailed("no answer")
    with pytest.raises(EngineFailed, match="rank 1: no answer"):
        backend.forward(INPUTS)
    with pytest.raises(EngineFailed, match="rank 1: no answer"):
        backend.forward(INPUTS)
    assert recorded.events == ["sent"]
