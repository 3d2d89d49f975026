"""What a program of native operations reads says what the step's tensors say."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.backends.native.buffers import BatchPages, StepArrays
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.inputs import StepInputs
from tests.support.examples import examples

PAGE_SIZE = 4


def make_sequence(length: int, rng: random.Random) -> Sequence:
    prompt = tuple(rng.randrange(1000) for _ in range(length))
    sequence = Sequence(Request("r", prompt, SamplingParams()))
    sequence.page_ids = rng.sample(range(100), -(-length // PAGE_SIZE))
    return sequence


def check(arrays: StepArrays, batch: Batch) -> None:
    wanted = StepInputs.build(batch, PAGE_SIZE)
    arrays.fill(batch.columns())
    num_tokens, num_rows = len(wanted.token_ids), len(batch.rows)
    assert int(arrays.num_tokens) == num_tokens
    assert int(arrays.num_rows) == num_rows
    assert int(arrays.num_logits) == num_rows
    plan = wanted.attention
    assert arrays.token_ids[:num_tokens].equal(wanted.token_ids)
    assert arrays.positions[:num_tokens].equal(wanted.positions)
    assert arrays.cells[:num_tokens].equal(plan.cells)
    assert arrays.logit_rows[:num_rows].equal(wanted.logit_rows)
    assert arrays.query_starts[: num_rows + 1].equal(plan.query_starts)
    assert arrays.context_lengths[:num_rows].equal(plan.context_lengths)
    for row, context in enumerate(plan.context_lengths.tolist()):
        pages = -(-context // PAGE_SIZE)
        assert arrays.rows.page_table[row, :pages].equal(plan.page_table[row, :pages])


def check_padding(arrays: StepArrays, num_rows: int) -> None:
    """Padding writes one page; the rows before it stay as they are."""
    own = [t[:num_rows].clone() for t in (arrays.token_ids, arrays.cells)]
    arrays.pad(6, page=77)
    kept = [t[:num_rows] for t in (arrays.token_ids, arrays.cells)]
    assert all(one.equal(other) for one, other in zip(own, kept, strict=True))
    assert int(arrays.num_tokens) == int(arrays.num_rows) == int(arrays.num_logits) == 6
    assert arrays.query_starts.tolist() == list(range(7))
    assert arrays.logit_rows.tolist() == list(range(6))
    assert (arrays.context_lengths[num_rows:] == 1).all()
    assert (arrays.cells[num_rows:6] == 77 * PAGE_SIZE).all()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_step_after_step(seed: int) -> None:
    """Sequences grow, are recomputed on other pages, change places and leave."""
    rng = random.Random(seed)
    arrays = StepArrays(200, 6, PAGE_SIZE, BatchPages(6, 12))
    sequences = [make_sequence(rng.randint(1, 30), rng) for _ in range(6)]
    for _ in range(8):
        rows, all_decode = [], rng.random() < 0.4
        for sequence in rng.sample(sequences, rng.randint(1, 6)):
            known = len(sequence.token_ids)
            end = known if all_decode else rng.randint(1, known)
            start = end - 1 if all_decode or rng.random() < 0.5 else rng.randrange(end)
            rows.append(BatchRow(sequence, start, end - start, end == known))
        check(arrays, Batch(tuple(rows)))
        if Batch(tuple(rows)).columns().is_decode:
            check_padding(arrays, len(rows))
        sequence = rng.choice(sequences)
        if rng.random() < 0.3:  # preempted: other pages, in another list
            sequence.page_ids = rng.sample(range(100), len(sequence.page_ids))
        elif len(sequence.token_ids) < 40:
            sequence.token_ids.append(rng.randrange(1000))
            missing = -(-len(sequence.token_ids) // PAGE_SIZE) - len(sequence.page_ids)
            sequence.page_ids += rng.sample(range(100), missing)
