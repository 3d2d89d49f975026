"""Who is refused before it waits, and the hint when to come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inference_svc.core import (
    Batch,
    BatchRow,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Sequence,
    Usage,
)
from inference_svc.engine.admission import LONGEST_S, UNKNOWN_S, Admission
from inference_svc.engine.pace import Pace
from inference_svc.engine.pages import PagePool
from inference_svc.engine.scheduler import Limits, Scheduler
from tests.inference_svc.engine.world import World


def request(number: int, tenant: str = "", digest: str = "", **more: object) -> Request:
    sampling = SamplingParams(max_tokens=30)
    return Request(f"{number}", (1,) * 10, sampling, digest, tenant=tenant, **more)


@pytest.fixture
def full() -> Callable[..., Admission]:
    """`full(tenant=count)`: an engine of one place that is taken, and so many that wait."""

    def make(max_queue: int = 8, max_tenant_queue: int = 8, **waiting: int) -> Admission:
        scheduler = Scheduler(Limits(1, 64, 64), PagePool(99, 4), World(0).residency)
        scheduler.add(Sequence(request(0)), 0.0)
        scheduler.schedule(0.0)
        for tenant, count in waiting.items():
            for _ in range(count):
                scheduler.add(Sequence(request(1, tenant)), 0.0)
        return Admission(scheduler, max_queue, max_tenant_queue)

    return make


def work(pace: Pace, requests_per_s: float, num_tokens: int, now_s: float = 0.0) -> float:
    """Ten seconds in which requests of `num_tokens` prompt and 10 generated tokens ended."""
    sequence = Sequence(request(0))
    pace.note(Batch(()), (), now_s, is_busy=True)
    for _ in range(round(10 * requests_per_s)):
        now_s += 1 / requests_per_s
        batch = Batch((BatchRow(sequence, 0, num_tokens + 10, True),))
        usage = Usage(num_tokens, 0, 10)
        output = Output("r", finish_reason=FinishReason.STOP, usage=usage)
        pace.note(batch, [output], now_s, is_busy=True)
    return now_s


def test_places_that_are_free_count(full: Callable[..., Admission]) -> None:
    assert full(max_queue=2, t=1).refusal(request(1, "t"), 0.0) is None
    refused = full(max_queue=2, t=2).refusal(request(1, "t"), 0.0)
    assert refused is not None
    assert refused.retry_after_s == UNKNOWN_S, "nothing has been measured"
    idle = full(max_queue=0)
    assert idle.refusal(request(1), 0.0) is not None
    idle.scheduler.remove(idle.scheduler.running[0])
    assert idle.refusal(request(1), 0.0) is None


def test_one_tenant_cannot_fill_the_queue_for_others(full: Callable[..., Admission]) -> None:
    admission = full(max_tenant_queue=4, greedy=4)
    assert admission.refusal(request(1, "greedy"), 0.0) is not None
    assert admission.refusal(request(1, "other"), 0.0) is None


def test_the_hint_is_the_measured_pace_and_each_place_is_promised_once(
    full: Callable[..., Admission],
) -> None:
    admission = full(max_queue=4, t=4)
    now_s = work(admission.pace, requests_per_s=5.0, num_tokens=10)
    hints = [admission.refusal(request(1, "t"), now_s).retry_after_s for _ in range(1000)]
    assert hints[:3] == pytest.approx([0.2, 0.4, 0.6], rel=0.1)
    assert max(hints) <= LONGEST_S
    later = admission.refusal(request(1, "t"), now_s + 1000.0).retry_after_s
    assert later == pytest.approx(0.2, rel=0.1), "what was promised is over"


def test_a_hopeless_deadline_is_refused_at_once(full: Callable[..., Admission]) -> None:
    """40 requests of 10 and about 10 generated tokens, at 100 tokens per second: 8 seconds."""
    admission = full(max_queue=99, max_tenant_queue=99, t=40)
    assert admission.refusal(request(1, "t", deadline_s=0.1), 0.0) is None, "nothing is known"
    now_s = work(admission.pace, requests_per_s=5.0, num_tokens=10)
    refused = admission.refusal(request(1, "t", deadline_s=now_s + 2.0), now_s)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(6.0, rel=0.1)
    for fine in (
        request(1, "t"),
        request(1, "t", deadline_s=now_s + 5.0),
        request(1, "other", deadline_s=now_s + 2.0),
        request(1, "t", deadline_s=now_s + 2.0, priority=1),
    ):
        assert admission.refusal(fine, now_s) is None


def test_idle_time_is_not_pace() -> None:
    pace = Pace()
    now_s = work(pace, requests_per_s=4.0, num_tokens=40)
    assert pace.tokens_per_s == pytest.approx(200, rel=0.1)
    assert pace.generated_per_request == pytest.approx(10)
    pace.note(Batch(()), (), now_s, is_busy=False)
    pace.note(Batch(()), (), now_s + 3600, is_busy=True)
    assert pace.requests_per_s == pytest.approx(4.0, rel=0.1)
    now_s = work(pace, requests_per_s=16.0, num_tokens=10, now_s=now_s + 3600)
    work(pace, requests_per_s=16.0, num_tokens=10, now_s=now_s)
    assert pace.requests_per_s > 12, "what was long ago counts little"
