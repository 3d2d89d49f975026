"""The scheduler's policy, without a device: budgets, pages, adapters, order of service."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import BASE_SLOT, Batch, Request, SampledToken, SamplingParams, Sequence
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from tests.support.examples import examples
from tests.support.inference.loop import TwoAdapterRows


def make(request_id: str, prompt: list[int], max_tokens: int, digest: str = "") -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    arrival_s = float(request_id)
    return Sequence(Request(request_id, tuple(prompt), sampling, digest, arrival_s=arrival_s))


def scheduler_of(
    pages: int, max_sequences: int = 4, budget: int = 16, chunk: int = 16, page_size: int = 4
) -> tuple[Scheduler, TwoAdapterRows]:
    view = TwoAdapterRows()
    limits = Limits(max_sequences, budget, chunk)
    return Scheduler(limits, States(Pages(pages, page_size)), view), view


def settle(scheduler: Scheduler, batch: Batch) -> list[str]:
    """Samples token 7 for every row; returns the ids of the requests that ended."""
    settler = Settler(scheduler, frozenset(), max_model_len=64)
    sampled = [SampledToken(7) for row in batch.rows if row.samples]
    outputs = settler.settle(batch, sampled, 0.0)
    return [output.request_id for output in outputs if output.is_last]


request_lists = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 12),
        st.sampled_from(["", "a", "b", "c"]),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(request_lists, st.integers(8, 24), st.integers(1, 16), st.integers(4, 20))
def test_every_request_is_served_within_limits(
    requests: list[tuple[list[int], int, str, int]], pages: int, chunk: int, budget: int
) -> None:
    """Whatever arrives when: limits hold in every step, and everything ends, whole."""
    scheduler, view = scheduler_of(pages, budget=budget, chunk=chunk)
    pending = [
        (step, make(str(i), prompt, tokens, digest))
        for i, (prompt, tokens, digest, step) in enumerate(requests)
    ]
    sequences = [sequence for _step, sequence in pending]
    for step in range(2000):
        for due, sequence in pending:
            if due == step:
                scheduler.add(sequence, float(step))
        aged_s = scheduler.queue.aged_s(float(step))
        view.load_one([digest for digest, _ in scheduler.queue.turns.in_order(aged_s)])
        batch = scheduler.schedule(float(step))
        scheduler.check_integrity()
        if batch is not None:
            check_batch(scheduler, batch, chunk, budget)
            settle(scheduler, batch)
        if step > 30 and not len(scheduler.queue) and not scheduler.running:
            break
    for sequence, (_prompt, max_tokens, _digest, _step) in zip(sequences, requests, strict=True):
        assert sequence.num_output == max_tokens
    scheduler.check_integrity()
    assert scheduler.states.num_used == 0
    assert not any(view.users.values())
    assert not any(view.waiters.values())


def check_batch(scheduler: Scheduler, batch: Batch, chunk: int, budget: int) -> None:
    assert len(batch.rows) <= scheduler.limits.max_sequences
    assert sum(row.num_tokens for row in batch.rows) <= budget
    slots = [row.slot for row in batch.rows]
    assert slots == sorted(slots), "rows of one slot are neighbours"
    for row in batch.rows:
        assert 0 < row.num_tokens <= max(chunk, 1)
        assert row.start == row.sequence.num_computed
        assert row.samples == (row.start + row.num_tokens == len(row.sequence.token_ids))
        assert (row.slot == BASE_SLOT) == (row.sequence.request.key == "")


def test_decodes_run_during_a_long_prefill() -> None:
    scheduler, _view = scheduler_of(32, budget=8, chunk=8)
    scheduler.add(make("0", [1] * 4, 20), 0.0)
    settle(scheduler, scheduler.schedule(0.0))
    scheduler.add(make("1", [2] * 30, 5), 0.0)
    for _ in range(4):
        batch = scheduler.schedule(0.0)
        assert {row.sequence.request.request_id for row in batch.rows} == {"0", "1"}
        assert sum(row.num_tokens for row in batch.rows) <= 8
        settle(scheduler, batch)


def test_missing_adapter_delays_no_other() -> None:
    scheduler, view = scheduler_of(32)
    scheduler.add(make("0", [1], 2, "missing"), 0.0)
    scheduler.add(make("1", [1], 2), 0.0)
    batch = scheduler.schedule(0.0)
    assert [row.sequence.request.request_id for row in batch.rows] == ["1"]
    view.load_one(["missing"])
    assert len(scheduler.schedule(0.0).rows) == 1 + 1


def test_draining_adapter_gets_no_new_user() -> None:
    scheduler, view = scheduler_of(64)
    view.resident = ["a", "b"]
    scheduler.add(make("0", [1], 9, "a"), 0.0)
    scheduler.schedule(0.0)
    view.drains = {"a"}
    scheduler.add(make("1", [1], 2, "a"), 1.0)
    scheduler.add(make("2", [1], 2, "b"), 1.0)
    assert {row.sequence.request.request_id for row in scheduler.schedule(1.0).rows} == {"0", "2"}
    view.drains, view.ready = set(), ["a"]
    assert len(scheduler.schedule(2.0).rows) == 3


def test_last_in_order_is_preempted_and_recomputed() -> None:
    scheduler, _view = scheduler_of(4)
    first, second = make("0", [1] * 8, 6), make("1", [2] * 6, 4)
    for sequence in (first, second):
        scheduler.add(sequence, 0.0)
    while first.num_output < 6:
        settle(scheduler, scheduler.schedule(0.0))
        scheduler.check_integrity()
    assert second.num_preemptions > 0
    assert first.num_preemptions == 0
    while (batch := scheduler.schedule(0.0)) is not None:
        settle(scheduler, batch)
    assert second.num_output == 4


def test_priority_goes_before_arrival() -> None:
    scheduler, _view = scheduler_of(32, max_sequences=1)
    low = Sequence(Request("low", (1,), SamplingParams(max_tokens=1), arrival_s=0.0))
    high = Sequence(Request("high", (1,), SamplingParams(max_tokens=1), priority=1, arrival_s=1.0))
    scheduler.add(low, 0.0)
    scheduler.add(high, 1.0)
    assert scheduler.schedule(1.0).rows[0].sequence is high


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_a_prompt_that_they_can_share(caching: bool) -> None:
    """Without a prefix cache each computes it, and none waits for it."""
    limits = Limits(max_sequences=4, max_batch_tokens=64, max_prefill_chunk=16)
    scheduler = Scheduler(limits, States(Pages(64, 4, caching=caching)), TwoAdapterRows())
    for request_id in "012":
        sequence = make(request_id, list(range(12)), 2)
        sequence.request = replace(sequence.request, group="g")
        scheduler.add(sequence, 0.0)
    batches = [scheduler.schedule(0.0)]
    settle(scheduler, batches[0])
    batches.append(scheduler.schedule(0.0))
    rows = [[(row.sequence.request.request_id, row.num_tokens) for row in b.rows] for b in batches]
    if caching:
        assert rows == [[("0", 12)], [("0", 1), ("1", 4), ("2", 4)]]
    else:
        assert rows == [[("0", 12), ("1", 12), ("2", 12)], [("0", 1), ("1", 1), ("2", 1)]]


def test_a_prefix_is_shared_within_one_adapter_only() -> None:
    scheduler, view = scheduler_of(64)
    view.resident = ["a", "b"]
    prompt = list(range(12))
    for request_id, digest, cached in (("0", "a", 0), ("1", "a", 8), ("2", "b", 0), ("3", "", 0)):
        sequence = make(request_id, prompt, 1, digest)
        scheduler.add(sequence, 0.0)
        settle(scheduler, scheduler.schedule(0.0))
        assert sequence.num_cached == cached
