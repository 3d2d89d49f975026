"""Steps sent to a device: what is there is the step, and no more of the page table is sent."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.backends.cuda.inputs import CudaInputs
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.cuda.pages import MAX_ROW_UPDATES, PageTable
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.inputs import StepInputs
from kernels.streams import Streams
from tests.support.examples import examples

CPU = torch.device("cpu")
PAGE_SIZE, MAX_PAGES, MAX_TOKENS, MAX_ROWS = 4, 10, 100, 6
PADDING_PAGE = 99


def padded_to(num_rows: int) -> StepShape:
    return StepShape.of_decodes(StepKind.LORA, num_rows)


class WatchedTable(PageTable):
    """Counts what is sent apart from the block."""

    num_copies = 0

    def send(self) -> None:
        self.num_copies += len(self._copies)
        super().send()


class Device:
    """Steps of prompts and of decodes over one page table."""

    def __init__(self) -> None:
        stream = Streams.of(CPU).compute
        self.table = WatchedTable(MAX_ROWS, MAX_PAGES, PADDING_PAGE, CPU, stream)
        self.prompts, self.decodes = (
            CudaInputs(count, num_rows, self.table, PAGE_SIZE, reserved_bytes=0)
            for count, num_rows in ((MAX_TOKENS, MAX_ROWS + 1), (MAX_ROWS, MAX_ROWS))
        )

    def send(self, batch: Batch, pad_to: StepShape | None = None) -> StepInputs:
        """The step as the device sees it."""
        step = self.decodes if batch.columns().is_decode else self.prompts
        step.fill(batch.columns())
        if pad_to is not None:
            step.pad(pad_to)
        step.send()
        step.write_pages()
        self.table.close()
        return step.inputs()

    def pages_of(self, inputs: StepInputs, row: int) -> list[int]:
        plan = inputs.attention
        count = -(-int(plan.context_lengths[row]) // PAGE_SIZE)
        return plan.page_table[plan.table_rows[row], :count].tolist()


@pytest.fixture
def device() -> Device:
    return Device()


def make_sequence(length: int, rng: random.Random) -> Sequence:
    prompt = tuple(rng.randrange(1000) for _ in range(length))
    sequence = Sequence(Request("r", prompt, SamplingParams()))
    sequence.page_ids = rng.sample(range(90), -(-length // PAGE_SIZE))
    return sequence


def grow(sequence: Sequence, rng: random.Random) -> None:
    """By a token, and a page when it needs one."""
    sequence.token_ids.append(rng.randrange(1000))
    if len(sequence.token_ids) > PAGE_SIZE * len(sequence.page_ids):
        sequence.page_ids += rng.sample(range(90), 1)


def decodes(sequences: list[Sequence]) -> Batch:
    return Batch(tuple(BatchRow(s, len(s.token_ids) - 1, 1, samples=True) for s in sequences))


def check(device: Device, batch: Batch) -> None:
    """What the device has is what the step's tensors say."""
    got, wanted = device.send(batch), StepInputs.build(batch, PAGE_SIZE)
    for name in ("token_ids", "positions", "logit_rows"):
        assert getattr(got, name).equal(getattr(wanted, name)), name
    for name in ("cells", "query_starts", "context_lengths", "tiles"):
        assert getattr(got.attention, name).equal(getattr(wanted.attention, name)), name
    assert got.attention.page_table.stride(0) == MAX_PAGES, "as a recorded step reads it"
    for row, (sequence, *_) in enumerate(batch.rows):
        pages = device.pages_of(got, row)
        assert pages == sequence.page_ids[: len(pages)]


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_steps_arrive_whole(seed: int) -> None:
    """Sequences come, grow, change places, are preempted, and go; some steps are given up."""
    device = Device()
    rng = random.Random(seed)
    sequences = [make_sequence(rng.randint(1, 30), rng) for _ in range(MAX_ROWS)]
    for _ in range(30):
        if rng.random() < 0.2:
            sequences[rng.randrange(MAX_ROWS)] = make_sequence(rng.randint(1, 30), rng)
        if rng.random() < 0.2:
            chosen = rng.choice(sequences)
            chosen.page_ids = rng.sample(range(90), len(chosen.page_ids))
        if rng.random() < 0.3:
            rng.shuffle(sequences)
        for sequence in sequences:
            if len(sequence.token_ids) < PAGE_SIZE * MAX_PAGES:
                grow(sequence, rng)
        running = sequences[: rng.randint(1, MAX_ROWS)]
        if rng.random() < 0.2:
            lost = device.decodes
            lost.fill(decodes(running).columns())
            if rng.random() < 0.5:
                lost.send()
        if rng.random() < 0.6:
            check(device, decodes(running))
            continue
        rows, left = [], MAX_TOKENS
        for sequence in running:
            length = len(sequence.token_ids)
            start = rng.choice([0, length - 1])
            if length - start <= left:
                rows.append(BatchRow(sequence, start, length - start, samples=rng.random() < 0.7))
                left -= length - start
        check(device, Batch(tuple(rows)))


def test_only_new_pages_are_sent(device: Device) -> None:
    rng = random.Random(1)
    sequences = [make_sequence(4 * (MAX_ROW_UPDATES + 1), rng) for _ in range(MAX_ROWS)]
    device.send(decodes(sequences))
    assert device.table.num_copies == MAX_ROWS, "each of them is new"
    for _ in range(8):
        for sequence in sequences:
            grow(sequence, rng)
        rng.shuffle(sequences)
        check(device, decodes(sequences))
    assert device.table.num_copies == MAX_ROWS, "a page at a time rides in the block"
    sequences[2] = make_sequence(20, rng)
    check(device, decodes(sequences))
    assert device.table.num_copies == MAX_ROWS + 1


def test_padding_reads_its_own_page(device: Device) -> None:
    rng = random.Random(2)
    sequences = [make_sequence(9, rng) for _ in range(2)]
    inputs = device.send(decodes(sequences), pad_to=padded_to(5))
    assert len(inputs.token_ids) == 5
    for row in range(5):
        wanted = sequences[row].page_ids if row < 2 else [PADDING_PAGE]
        assert device.pages_of(inputs, row) == wanted
    assert (inputs.attention.cells[2:] == PADDING_PAGE * PAGE_SIZE).all()
    device.decodes.fill_padding(padded_to(MAX_ROWS))
    device.decodes.send()
    whole = device.decodes.padded_inputs(padded_to(MAX_ROWS)).attention
    assert (whole.table_rows == MAX_ROWS).all()
    assert whole.page_table.data_ptr() == inputs.attention.page_table.data_ptr()


def test_padding_beside_prompts_is_a_row_of_its_own(device: Device) -> None:
    """It reads and writes its page alone, and rows that are not there have nothing to compute."""
    rng = random.Random(4)
    rows = [make_sequence(length, rng) for length in (9, 12, 5)]
    counts = (9, 1, 3)  # a prompt, a decode row, and the end of a prompt
    batch = Batch(
        tuple(
            BatchRow(row, len(row.token_ids) - n, n, samples=True)
            for row, n in zip(rows, counts, strict=True)
        )
    )
    wanted = device.send(batch)
    shape = StepShape(StepKind.LORA, 32, MAX_ROWS, has_prompts=True)
    device.send(batch, pad_to=shape)
    inputs = device.prompts.padded_inputs(shape)
    plan, num_tokens = inputs.attention, sum(counts)
    for name in ("token_ids", "positions", "logit_rows"):
        own = getattr(wanted, name)
        assert torch.equal(getattr(inputs, name)[: len(own)], own), name
    assert (len(inputs.token_ids), len(inputs.logit_rows)) == (32, MAX_ROWS)
    assert torch.equal(plan.cells[:num_tokens], wanted.attention.cells)
    padding = plan.cells[num_tokens:]
    assert ((padding // PAGE_SIZE) == PADDING_PAGE).all()
    starts = [0, 9, 10, 13, 13, 13, 13, 32]
    assert plan.query_starts.tolist() == starts
    assert plan.context_lengths.tolist() == [9, 12, 5, 0, 0, 0, 32 - 13]
    assert device.pages_of(inputs, MAX_ROWS) == [PADDING_PAGE] * 5
    segments = plan.segment_starts.diff().tolist()
    assert segments[0] == segments[2] == 0, "rows of several queries have tiles"
    assert segments[1] > 0
    assert segments[3:] == [0] * 4
    tiles = [tuple(each) for each in plan.tiles.tolist()]
    ends = dict(enumerate(plan.query_starts.diff().tolist()))
    assert [each for each in tiles if each[1] < ends[each[0]]] == [(0, 0), (2, 0), (MAX_ROWS, 0)]
    check(device, decodes(rows))


def test_a_batch_of_other_sequences_takes_the_rows_least_used(device: Device) -> None:
    """Also right after one that filled the table."""
    rng = random.Random(3)
    for _ in range(5):
        check(device, decodes([make_sequence(11, rng) for _ in range(MAX_ROWS)]))
