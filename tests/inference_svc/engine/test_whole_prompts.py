"""Prompts of encoders are computed whole: no step has a part of one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.results.base import Wanted
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from tests.support.examples import examples
from tests.support.inference.loop import TwoAdapterRows

MOST, BUDGET = 20, 32


def make(request_id: str, length: int, tenant: str = "") -> Sequence:
    option = PoolingOption(Pooling.MEAN, True, 4, 4)
    sampling = SamplingParams(max_tokens=0)
    wanted = Wanted((option,))
    request = Request(request_id, (5,) * length, sampling, wanted=wanted, tenant=tenant)
    return Sequence(request)


def scheduler_of(max_sequences: int = 8) -> Scheduler:
    limits = Limits(max_sequences, BUDGET, BUDGET, computes_whole=True)
    pages = Pages(max_sequences * 5, 4, caching=False)
    return Scheduler(limits, States(pages), TwoAdapterRows())


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, MOST), st.sampled_from("ab")), min_size=1, max_size=30))
def test_every_prompt_is_one_row(prompts: list[tuple[int, str]]) -> None:
    """Whatever their lengths and tenants, within the tokens of a step; and none is left behind."""
    scheduler = scheduler_of()
    for index, (length, tenant) in enumerate(prompts):
        scheduler.add(make(str(index), length, tenant), 0.0)
    computed = []
    while (batch := scheduler.schedule(0.0)) is not None:
        assert sum(row.num_tokens for row in batch.rows) <= BUDGET
        for sequence, start, num_tokens, samples in batch.rows:
            assert (start, num_tokens, samples) == (0, sequence.num_prompt, False)
            sequence.num_computed = num_tokens
            computed.append(sequence.request.request_id)
            scheduler.remove(sequence)
        scheduler.states.check_integrity([])
    assert sorted(computed) == sorted(map(str, range(len(prompts))))


def test_a_prompt_that_is_too_long_for_now_is_alone() -> None:
    scheduler = scheduler_of(max_sequences=4)
    scheduler.step_limit.ran_out(16)
    for index, length in enumerate((3, MOST, 3)):
        scheduler.add(make(str(index), length), 0.0)
    sizes = []
    while (batch := scheduler.schedule(0.0)) is not None:
        sizes.append([row.num_tokens for row in batch.rows])
        for row in batch.rows:
            row.sequence.num_computed = row.num_tokens
            scheduler.remove(row.sequence)
    assert sizes == [[3], [MOST], [3]]


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [(9, [[7, 1], [9], [4, 4]]), (4, [[7], [1], [9], [4], [4]]), (99, [[7, 1, 9, 4, 4]])],
)
def test_fewer_rows_at_once_if_memory_is_short(tokens: int, parts: list[list[int]]) -> None:
    limit = StepLimit(200, computes_whole=True)
    limit.ran_out(2 * tokens)
    left = tuple(BatchRow(make("", size), 0, size, samples=False) for size in (7, 1, 9, 4, 4))
    found = []
    while left:
        part, left = limit.cut(left)
        found.append([row.num_tokens for row in part])
    assert found == parts
