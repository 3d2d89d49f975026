"""Rank 0's backend keeps in step with the other ranks, whatever becomes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import DivideMagnitudes
from inference_svc.backends.exchange import ExchangeFailed, StepAbandoned
from inference_svc.backends.magnitudes import Divided
from inference_svc.backends.slot_runs import SlotRuns
from inference_svc.backends.step_data import ScoredSlice, StepData
from inference_svc.engine.ranks.backend import RankedBackend, RankedInputs
from inference_svc.engine.ranks.messages import DIVIDE, IDLE
from inference_svc.engine.ranks.report import Report
from inference_svc.engine.ranks.steps import SlotDivide, decode_changes
from inference_svc.errors import EngineFailed
from inference_svc.model.description import Rank
from tests.support.inference.memory_store import make_image
from tests.support.inference.ranks import exchanges

SCORED = [ScoredSlice([0], SlotRuns([-1], [1]))] * 3
STEP = StepData([5], [0], [1], [[0]], SlotRuns([-1], [1]), [-1], SCORED, [], [])


class Recorded:
    """A backend of rank 0 and the group of the others, which write down their exchanges."""

    failure: EngineFailed | None = None
    count = 2
    is_dividing = False
    wants_idle_time = False
    pictures = None

    def __init__(self) -> None:
        self.report = Report(Rank(0, 2), 1)
        [self.report.exchange] = exchanges(1)
        self.events: list[str] = []
        self.error: Exception | None = None

    def send_step(self, buffer: bytes) -> None:
        self.events.append("sent")

    def send_changes(self, kind: bytes, buffer: bytes) -> None:
        self.events.append(f"sent {kind!r} {decode_changes(buffer)}")

    def use_idle_time(self) -> bool:
        if self.error is not None:
            raise self.error
        self.events.append("used idle time")
        return False

    def restore(self) -> None:
        if self.error is not None:
            raise self.error

    def begin_restore(self) -> Callable[[], int]:
        self.events.append("sent restore")
        return lambda: 0

    def land(self, extents: Any) -> None:
        """Has nothing to copy."""

    def place_threads(self, processors: Any) -> None:
        """Has no threads."""

    def apply(self, changes: Any) -> None:
        self.is_dividing = True

    def divide_magnitudes(self) -> list[Divided]:
        if self.error is not None:
            raise self.error
        self.events.append("divided")
        self.is_dividing = False
        return [Divided("sha256:abc")]

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
    return RankedBackend(own, own, own, max_scored=8)


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


HEADER = make_image("sha256:abc", 4).header
DIVISION = DivideMagnitudes(Resident(HEADER, 3, (Extent(0, 0, 256),), 4))


def test_ranks_divide_magnitudes_together(recorded: Recorded, backend: RankedBackend) -> None:
    """While there are any, without a step too, and behind the scores that nobody has read."""
    assert backend.divide_magnitudes() == []
    backend.forward(INPUTS)
    backend.apply([DIVISION])
    assert backend.divide_magnitudes() == [Divided("sha256:abc")]
    assert backend.divide_magnitudes() == []
    scored = ["scored 0", "scored 1", "scored 2"]
    sent = f"sent {DIVIDE!r} {[SlotDivide(3, 'sha256:abc')]}"
    assert recorded.events == ["sent", "computed", *scored, sent, "divided"]


def test_ranks_use_idle_time_together(recorded: Recorded, backend: RankedBackend) -> None:
    """If rank 0 has anything to record, behind the changes before."""
    assert not backend.use_idle_time()
    assert recorded.events == []
    backend.apply([DIVISION])
    recorded.wants_idle_time = True
    assert not backend.use_idle_time()
    sent = f"sent {IDLE!r} {[SlotDivide(3, 'sha256:abc')]}"
    assert recorded.events == [sent, "used idle time"]
    recorded.error = ExchangeFailed("no answer")
    with pytest.raises(EngineFailed, match="rank 1: no answer"):
        backend.use_idle_time()


@pytest.mark.parametrize("error", [ExchangeFailed("no answer"), StepAbandoned("no answer")])
def test_ranks_that_lose_each_other_at_wake_end_the_engine(
    error: Exception, recorded: Recorded, backend: RankedBackend
) -> None:
    """Memory that one of them lacks does not: it may be there the next time."""
    recorded.error = MemoryError("no memory")
    with pytest.raises(MemoryError):
        backend.restore()
    assert recorded.failure is None
    recorded.error = error
    with pytest.raises(EngineFailed, match="rank 1: no answer"):
        backend.restore()
    assert recorded.failure is not None


def test_an_error_while_ranks_divide_ends_the_engine(
    recorded: Recorded, backend: RankedBackend
) -> None:
    backend.apply([DIVISION])
    recorded.error = ExchangeFailed("no answer")
    for _ in range(2):
        with pytest.raises(EngineFailed, match="rank 1: no answer"):
            backend.divide_magnitudes()
    assert len(recorded.events) == 1
