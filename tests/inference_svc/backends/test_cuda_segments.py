"""Where a step's tokens find recurrent states and leave them: at fixed addresses, padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from inference_svc import core
from inference_svc.backends.cuda.inputs import StepBlock
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.cuda.segments import CudaSegments
from kernels.recurrence import NOWHERE
from kernels.streams import HostStream

MAX_TOKENS, MAX_ROWS, SPARE = 40, 6, 99
DECODES = StepShape.of_decodes(StepKind.BASE, MAX_ROWS)
PROMPTS = StepShape(StepKind.BASE, MAX_TOKENS, MAX_ROWS - 1, has_prompts=True)


class Row(NamedTuple):
    """A row's first token and length, the tokens that are computed, and borders."""

    start: int
    num_tokens: int
    num_computed: int
    borders: Sequence[int] = ()


def columns(rows: Sequence[Row], *, is_decode: bool = False) -> core.BatchColumns:
    """Sequence i reads slot 2 i + 1 and writes the next one; its borders have slots from 50 on."""
    made = []
    for index, (start, count, num_computed, borders) in enumerate(rows):
        tokens = tuple(range(start + count))
        sequence = core.Sequence(core.Request(str(index), tokens, core.SamplingParams()))
        sequence.num_computed = num_computed
        sequence.state_read, sequence.state_written = 2 * index + 1, 2 * index + 2
        sequence.state_borders = [(end, 50 + 10 * index + n) for n, end in enumerate(borders)]
        made.append(core.BatchRow(sequence, start, count, samples=is_decode))
    return core.Batch(tuple(made)).columns()


@pytest.fixture
def filled():
    """`filled(batch, shape)` returns what lies on the device: of each row its segments, and of
    each token its three numbers."""
    num_bytes = CudaSegments.num_bytes(MAX_TOKENS, MAX_ROWS)
    block = StepBlock(num_bytes, torch.device("cpu"), HostStream("compute"))
    segments = CudaSegments(block, MAX_TOKENS, MAX_ROWS, SPARE)

    def fill(batch: core.BatchColumns | None, shape: StepShape | None):
        segments.fill(batch, shape)
        block.send()
        found = segments.plan(None, shape).on_device
        firsts, starts = found.firsts.tolist(), found.starts.tolist()
        each = [
            (int(found.read[i]), int(found.written[i]), starts[i + 1] - starts[i])
            for i in range(firsts[-1])
        ]
        rows = [each[a:b] for a, b in pairwise(firsts)]
        assert len(found.tokens) == starts[firsts[-1]]
        return rows, found.tokens.tolist(), (found.has_steps, found.has_chunks)

    return fill


def of_tokens(rows: list[list[tuple[int, int, int]]]) -> list[list[int]]:
    found = []
    for row in rows:
        before = 0
        for _, written, count in row:
            for index in range(count):
                is_last = index == count - 1
                found.append([before, row[0][0], written if is_last else NOWHERE])
                before += 1
    return found


def test_prompts_end_at_borders(filled):
    """And go on where a part of them has ended; padding is a row of its own."""
    batch = columns([Row(4, 12, 4, (8, 16, 20)), Row(9, 1, 9), Row(6, 5, 0, (8,))])
    rows = [[(1, 50, 4), (50, 2, 8)], [(3, 4, 1)], [(SPARE, 70, 2), (70, 6, 3)]]
    found, tokens, kinds = filled(batch, None)
    assert (found, tokens, kinds) == (rows, of_tokens(rows), (True, True))
    found, tokens, kinds = filled(batch, PROMPTS)
    padded = [*rows, [], [], [(0, NOWHERE, MAX_TOKENS - 18)]]
    assert (found, tokens, kinds) == (padded, of_tokens(padded), (True, True))
    assert filled(columns([Row(0, 3, 0)]), None)[2] == (False, True)


def test_as_many_rows_as_tokens(filled):
    """One row has two tokens with a border in between, and another one none."""
    batch = columns([Row(3, 1, 3), Row(7, 2, 7, (8,)), Row(4, 1, 4)])
    shape = StepShape(StepKind.BASE, 5, 4, has_prompts=True)
    wanted = [[(1, 2, 1)], [(3, 60, 1), (60, 4, 1)], [(5, 6, 1)], [], [(0, NOWHERE, 1)]]
    found, tokens, _ = filled(batch, shape)
    assert (found, tokens) == (wanted, of_tokens(wanted))
    assert tokens[2] == [1, 3, 4], "the second token's place, and the state before the first one"


@pytest.mark.parametrize("num_rows", [1, 4, MAX_ROWS])
def test_decodes(filled, num_rows):
    """In the same places with fewer operations, after a step that has left more."""
    filled(None, PROMPTS)
    rows = [Row(3 + index, 1, 3 + index if index != 2 else 0) for index in range(num_rows)]
    wanted = [[(SPARE if i == 2 else 2 * i + 1, 2 * i + 2, 1)] for i in range(num_rows)]
    for is_decode in (True, False):
        found, tokens, kinds = filled(columns(rows, is_decode=is_decode), None)
        assert (found, tokens, kinds) == (wanted, of_tokens(wanted), (True, False))
        found, tokens, kinds = filled(columns(rows, is_decode=is_decode), DECODES)
        padded = wanted + [[(0, NOWHERE, 1)]] * (MAX_ROWS - num_rows)
        assert (found, tokens, kinds) == (padded, of_tokens(padded), (True, False))


def test_padding_alone(filled):
    found, tokens, _ = filled(None, DECODES)
    assert found == [[(0, NOWHERE, 1)]] * MAX_ROWS
    assert tokens == [[0, 0, NOWHERE]] * MAX_ROWS
