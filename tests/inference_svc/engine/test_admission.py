"""Which requests are refused before they wait, and the hint when to retry."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.core import (
    Batch,
    BatchRow,
    FinishReason,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
)
from inference_svc.engine.compute.losses import Losses
from inference_svc.engine.compute.profiler import StepProfiler
from inference_svc.engine.compute.step_times import StepTimes
from inference_svc.engine.control.commands import Commands
from inference_svc.engine.control.life_cycle import LifeCycle
from inference_svc.engine.engine import Engine
from inference_svc.engine.policy.admission import (
    DEADLINE_SLACK,
    DEFAULT_RETRY_S,
    MAX_LEDGER_ENTRIES,
    MAX_RETRY_S,
    Admission,
)
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.policy.throughput import Throughput
from inference_svc.engine.transport.messages import Cancel, Output, Submit, Usage
from inference_svc.grammars.masks import Masks
from inference_svc.results.base import Wanted
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from tests.inference_svc.engine.server import Server
from tests.support.examples import examples
from tests.support.inference.world import World


def request(number: int, tenant: str = "", digest: str = "", **more: object) -> Request:
    sampling = SamplingParams(max_tokens=30)
    return Request(f"{number}", (1,) * 10, sampling, digest, tenant=tenant, **more)


@pytest.fixture
def full() -> Callable[..., Admission]:
    """`full(tenant=count)`: an engine of one place that is taken, and so many that wait."""

    def make(max_queue: int = 8, max_tenant_queue: int = 8, **waiting: int) -> Admission:
        scheduler = Scheduler(Limits(1, 64, 64), States(Pages(99, 4)), World(0).residency)
        scheduler.add(Sequence(request(0)), 0.0)
        scheduler.schedule(0.0)
        for tenant, count in waiting.items():
            for _ in range(count):
                scheduler.add(Sequence(request(1, tenant)), 0.0)
        return Admission(scheduler, max_queue, max_tenant_queue)

    return make


def work(
    throughput: Throughput, requests_per_s: float, num_tokens: int, now_s: float = 0.0
) -> float:
    """Ten seconds in which requests of `num_tokens` prompt and 10 generated tokens ended."""
    sequence = Sequence(request(0))
    throughput.observe(Batch(()), (), now_s, is_busy=True)
    for _ in range(round(10 * requests_per_s)):
        now_s += 1 / requests_per_s
        batch = Batch((BatchRow(sequence, 0, num_tokens + 10, True),))
        usage = Usage(num_tokens, 0, 10)
        output = Output("r", finish_reason=FinishReason.STOP, usage=usage)
        throughput.observe(batch, [output], now_s, is_busy=True)
    return now_s


def test_free_places_count(full: Callable[..., Admission]) -> None:
    assert full(max_queue=2, t=1).refusal(request(1, "t"), 0.0) is None
    refused = full(max_queue=2, t=2).refusal(request(1, "t"), 0.0)
    assert refused is not None
    assert refused.retry_after_s == DEFAULT_RETRY_S, "no rate is known"
    idle = full(max_queue=0)
    assert idle.refusal(request(1), 0.0) is not None
    idle.scheduler.remove(idle.scheduler.running[0])
    assert idle.refusal(request(1), 0.0) is None


def test_one_tenant_cannot_fill_the_queue(full: Callable[..., Admission]) -> None:
    admission = full(max_tenant_queue=4, greedy=4)
    assert admission.refusal(request(1, "greedy"), 0.0) is not None
    assert admission.refusal(request(1, "other"), 0.0) is None


def test_hint_follows_throughput_and_takes_each_place_once(
    full: Callable[..., Admission],
) -> None:
    admission = full(max_queue=4, t=4)
    now_s = work(admission.throughput, requests_per_s=5.0, num_tokens=10)
    hints = [admission.refusal(request(1, "t"), now_s).retry_after_s for _ in range(1000)]
    assert hints[:3] == pytest.approx([0.2, 0.4, 0.6], rel=0.1)
    assert max(hints) <= MAX_RETRY_S
    later = admission.refusal(request(1, "t"), now_s + 1000.0).retry_after_s
    assert later == pytest.approx(0.2, rel=0.1), "the times given have passed"


def test_deadline_that_will_pass_is_refused(full: Callable[..., Admission]) -> None:
    """40 requests of 10 and about 10 generated tokens, at 100 tokens per second: 8 seconds."""
    admission = full(max_queue=99, max_tenant_queue=99, t=40)
    assert admission.refusal(request(1, "t", deadline_s=0.1), 0.0) is None, "no rate is known"
    now_s = work(admission.throughput, requests_per_s=5.0, num_tokens=10)
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


@pytest.mark.parametrize("is_aged", [False, True], ids=["young", "aged"])
def test_flood_of_one_adapter_delays_no_other(is_aged: bool) -> None:
    """1,000 requests of 20 tokens at 100 tokens per second: 200 seconds for those of adapter "a",
    for "b" a quantum of 40 tokens, and as much again if the flood is aged."""
    server = Server(quantum=40, ageing_s=60.0 if is_aged else 1e9)
    for _ in range(1000):
        server.submit("t", "a", num_prompt=10, max_tokens=10)
    admission = Admission(server.scheduler, 2000, 2000)
    work(admission.throughput, requests_per_s=5.0, num_tokens=10)
    assert admission.refusal(request(1, "t", "a", deadline_s=99.0 + 50.0), 99.0) is not None
    assert admission.refusal(request(1, "t", "b", deadline_s=99.0 + 1.0), 99.0) is None
    assert admission.refusal(request(1, "t", "b", deadline_s=99.0 + 0.05), 99.0) is not None


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from("abcde"),
    st.integers(0, 1),
    st.integers(0, 30),
)
@example([("b", 1, 1, True), ("a", 1, 8, True)], "b", 1, 0)
def test_refused_request_would_have_waited(
    backlog: list[tuple[str, int, int, bool]], digest: str, priority: int, num_steps: int
) -> None:
    """For any backlog: the work that is counted is computed before the request, up to
    DEADLINE_SLACK and a quantum."""
    server = Server(quantum=60, ageing_s=10.0, num_places=1)
    for name, own_priority, count, is_aged in backlog:
        for number in range(count):
            more = {"priority": own_priority, "arrival_s": 5.0 + number if is_aged else 95.0}
            server.submit("t", name, num_prompt=10, max_tokens=10, **more)
    server.now_s = 100.0
    for _ in range(num_steps):
        server.step()
    admission = Admission(server.scheduler, 999, 999)
    work(admission.throughput, requests_per_s=5.0, num_tokens=10)
    tenant, num_started = server.scheduler.queue.tenant("t"), len(server.started)
    if tenant is None:
        return  # nothing waits any more
    late = request(0, "t", digest, priority=priority)
    counted = min(admission._work_before(late, tenant, 100.0), tenant.ready_tokens * 2)
    own = server.submit("t", digest, num_prompt=10, max_tokens=10, priority=priority)
    computed = 20 * (server.run().index(own.request) - num_started)
    assert counted <= DEADLINE_SLACK * (computed + server.quantum)


def test_cached_prefix_is_not_counted() -> None:
    """A shared prompt of 512 tokens: what waits computes its last tokens, and generates 8."""
    server = Server(quantum=1024, num_places=1)
    admission = Admission(server.scheduler, 999, 999)
    prompt, sampling = tuple(range(512)), SamplingParams(max_tokens=8, ignore_eos=True)

    def submit(number: int) -> None:
        prompt_ids = (*prompt, 1000 + number)
        server.scheduler.add(Sequence(Request(f"{number}", prompt_ids, sampling, tenant="t")), 0.0)

    for number in range(60):
        submit(number)
        while (batch := server.scheduler.schedule(server.now_s)) is not None:
            server.now_s += sum(row.num_tokens for row in batch.rows) / 100
            sampled = [SampledToken(7) for row in batch.rows if row.samples]
            outputs = server.settler.settle(batch, sampled, server.now_s)
            is_busy = bool(server.scheduler.running)
            admission.throughput.observe(batch, outputs, server.now_s, is_busy=is_busy)
    for number in range(60, 80):
        submit(number)
    seconds = 20 * 9 / 100
    late = request(99, "t", deadline_s=server.now_s + seconds)
    assert admission.refusal(late, server.now_s) is None
    late = request(99, "t", deadline_s=server.now_s + seconds / 4)
    assert admission.refusal(late, server.now_s) is not None


def test_retries_of_one_tenant_delay_no_other(full: Callable[..., Admission]) -> None:
    admission = full(max_queue=4, greedy=2, other=2)
    now_s = work(admission.throughput, requests_per_s=5.0, num_tokens=10)

    def hint_s(tenant: str, now_s: float = now_s) -> float:
        refused = admission.refusal(request(1, tenant), now_s)
        assert refused is not None
        return refused.retry_after_s

    greedy = [hint_s("greedy") for _ in range(1000)]
    assert greedy[:2] == pytest.approx([0.4, 0.8], rel=0.1), "two share the places"
    assert greedy[-1] == MAX_RETRY_S
    assert hint_s("other") == pytest.approx(0.4, rel=0.1)
    assert hint_s("new") == pytest.approx(0.6, rel=0.1), "a third tenant shares them"
    assert hint_s("greedy", now_s + 50.0) == pytest.approx(MAX_RETRY_S - 50.0, abs=1.0)
    assert hint_s("greedy", now_s + 200.0) == pytest.approx(0.4, rel=0.1)
    for number in range(2 * MAX_LEDGER_ENTRIES):
        hint_s(f"{number}")
    assert len(admission._retry_after) <= MAX_LEDGER_ENTRIES
    hint_s("late", now_s + 1000.0)
    assert len(admission._retry_after) == 1, "entries in the past are dropped"


def test_parked_requests_follow_the_unpark_rate(full: Callable[..., Admission]) -> None:
    """Ten requests per second end, but a parked one leaves every two seconds only."""
    admission = full(max_queue=4)
    scheduler = admission.scheduler
    now_s = work(admission.throughput, requests_per_s=10.0, num_tokens=10)
    parked = [Sequence(request(n, f"t{n % 2}", "abcde"[n % 5])) for n in range(40)]
    for sequence in parked:
        scheduler.add(sequence, now_s)
    refused = admission.refusal(request(99, "t0", "a"), now_s)
    assert refused is not None
    assert refused.retry_after_s == DEFAULT_RETRY_S, "no rate is known"
    for sequence in parked[:20]:
        admission.update_rates(now_s)
        now_s += 2.0
        scheduler.remove(sequence)
    admission.update_rates(now_s)
    hints = [admission.refusal(request(99, t, "a"), now_s).retry_after_s for t in ("t0", "t1")]
    assert hints == pytest.approx([4.0, 4.0], rel=0.15), "two tenants share the places"
    now_s += 3600.0
    admission.update_rates(now_s)
    assert admission.refusal(request(99, "t0", "a"), now_s).retry_after_s == MAX_RETRY_S


def test_idle_time_does_not_lower_throughput() -> None:
    throughput = Throughput()
    now_s = work(throughput, requests_per_s=4.0, num_tokens=40)
    assert throughput.tokens_per_s == pytest.approx(200, rel=0.1)
    assert throughput.generated_per_request == pytest.approx(10)
    throughput.observe(Batch(()), (), now_s, is_busy=False)
    throughput.observe(Batch(()), (), now_s + 3600, is_busy=True)
    assert throughput.requests_per_s == pytest.approx(4.0, rel=0.1)
    now_s = work(throughput, requests_per_s=16.0, num_tokens=10, now_s=now_s + 3600)
    work(throughput, requests_per_s=16.0, num_tokens=10, now_s=now_s)
    assert throughput.requests_per_s > 12, "old measurements count little"


def test_pooled_prompts_tell_nothing_of_the_length_of_answers() -> None:
    throughput = Throughput()
    wanted = Wanted((PoolingOption(Pooling.LAST, True, 4, 4),))
    pooled = Sequence(Request("p", (1, 2), SamplingParams(max_tokens=0), wanted=wanted))
    answered = Sequence(Request("g", (1,), SamplingParams()))
    outputs = [Output("p", usage=Usage(2, 0, 0)), Output("g", usage=Usage(1, 0, 30))]
    for step in range(9):
        rows = (BatchRow(pooled, 0, 2, True), BatchRow(answered, 0, 1, True))
        throughput.observe(Batch(rows, pools=True), outputs, float(step), is_busy=True)
    assert throughput.generated_per_request == pytest.approx(30)
    assert throughput.requests_per_s > 1.5


def test_engine_updates_rates_every_step() -> None:
    """Requests that wait for adapters, and leave without a step."""
    world = World(0)
    admission = Admission(world.scheduler, 8, 8)
    runner = Mock(backend=Mock(pop_completed_copies=list, divide_magnitudes=list))
    life_cycle = LifeCycle(world.scheduler, runner, world.residency, Mock())
    profiler = StepProfiler(None)
    mocks = [Mock() for _ in range(4)]
    losses = Losses("float32")
    commands = Commands(world.residency, *mocks, profiler, life_cycle, losses, 10.0)
    engine = Engine(
        world.scheduler,
        runner,
        world.settler,
        world.residency,
        Mock(),
        commands,
        admission,
        StepTimes(),
        losses,
        Masks(lambda: None, 4),
        10.0,
    )
    for number, digest in enumerate("abcde"):
        engine.step([Submit(request(number, "t", digest))])
        engine.step([Cancel(f"{number}")])
    assert not engine.sequences
    assert admission._unpark_rate.per_s is not None
    runner.run.assert_not_called()
