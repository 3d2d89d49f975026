"""Steps sent to a device: what is there is the step, and no more of the page table is sent."""

from __future__ import annotations

import random

import pytest
import torch

from inference_svc.backends import cuda_inputs
from inference_svc.backends.cuda_inputs import CudaInputs, StepBlock
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.inputs import StepInputs

CPU = torch.device("cpu")
PAGE_SIZE, MAX_PAGES, MAX_TOKENS, MAX_ROWS = 4, 10, 100, 6


class ApartBlock(StepBlock):
    """Both sides on the CPU, and apart as on a device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self._twin = self._host.clone()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> CudaInputs:
    monkeypatch.setattr(cuda_inputs, "StepBlock", ApartBlock)
    made = CudaInputs(MAX_TOKENS, MAX_ROWS, MAX_PAGES, PAGE_SIZE, CPU, reserved_bytes=512)
    made.block.zeros(128, dtype=torch.int32)  # made later, and lies before the page table
    return made


def make_sequence(length: int, rng: random.Random) -> Sequence:
    prompt = tuple(rng.randrange(1000) for _ in range(length))
    sequence = Sequence(Request("r", prompt, SamplingParams()))
    sequence.page_ids = rng.sample(range(100), -(-length // PAGE_SIZE))
    return sequence


def check(step: CudaInputs, batch: Batch) -> None:
    """What the device has is what the step's tensors say."""
    step.fill(batch)
    step.send()
    got, wanted = step.inputs(), StepInputs.build(batch, PAGE_SIZE)
    for name in ("token_ids", "positions", "logit_rows"):
        assert getattr(got, name).equal(getattr(wanted, name)), name
    for name in ("cells", "query_starts", "context_lengths", "tiles"):
        assert getattr(got.attention, name).equal(getattr(wanted.attention, name)), name
    table, wanted_table = got.attention.page_table, wanted.attention.page_table
    assert table.stride(0) == MAX_PAGES, "as a recorded step reads it"
    for row, context in enumerate(wanted.attention.context_lengths.tolist()):
        pages = -(-context // PAGE_SIZE)
        assert table[row, :pages].equal(wanted_table[row, :pages])


def test_steps_arrive_whole(step: CudaInputs) -> None:
    """Also the rows that an earlier step wrote, and that a later one finds unchanged."""
    rng = random.Random(0)
    sequences = [make_sequence(rng.randint(1, 30), rng) for _ in range(MAX_ROWS)]
    for _ in range(200):
        if rng.random() < 0.1:
            sequences[rng.randrange(MAX_ROWS)] = make_sequence(rng.randint(1, 30), rng)
        rows, left = [], MAX_TOKENS
        for sequence in sequences[: rng.randint(1, MAX_ROWS)]:
            length = len(sequence.token_ids)
            start = rng.choice([0, length - 1])
            if length - start <= left:
                rows.append(BatchRow(sequence, start, length - start, samples=rng.random() < 0.7))
                left -= length - start
        check(step, Batch(tuple(rows)))


def test_rows_behind_the_last_are_not_sent(step: CudaInputs) -> None:
    rng = random.Random(1)
    batches = [
        Batch(tuple(BatchRow(make_sequence(9, rng), 0, 9, samples=True) for _ in range(count)))
        for count in (MAX_ROWS, 2)
    ]
    check(step, batches[0])
    table = step.decode_inputs(MAX_ROWS).attention.page_table
    before = table.clone()
    step.fill_padding(99)
    check(step, batches[1])
    assert table[2:].equal(before[2:])
    step.fill_padding(99)
    step.send()
    assert (table[:, 0] == 99).all()
    assert step.decode_inputs(MAX_ROWS).attention.page_table.data_ptr() == table.data_ptr()
