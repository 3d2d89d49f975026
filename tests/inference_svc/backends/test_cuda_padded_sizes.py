"""The shapes of recorded steps have room for every step, waste little, and are recorded as they
occur."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.backends.cuda.graphs import (
    IDLE_STEPS,
    LATEST_USE,
    Compute,
    RecordedSteps,
    RecordingFailed,
)
from inference_svc.backends.cuda.padded_sizes import (
    StepKind,
    StepShape,
    StepShapes,
    decode_sizes,
    most_prompt_tokens,
    prompt_tokens,
)
from tests.support.gpu.models import Eager


def prompt(num_tokens: int, num_rows: int = 16, kind: StepKind = StepKind.LORA) -> StepShape:
    return StepShape(kind, num_tokens, num_rows, has_prompts=True)


def test_sizes():
    assert decode_sizes(6) == [1, 2, 4, 6]
    assert decode_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert prompt_tokens(70) == [16, 32, 64, 70]
    assert prompt_tokens(512)[-3:] == [384, 448, 512]
    assert [prompt_tokens(n)[-1] for n in (600, 2048, 4096, 8192)] == [512, 1024, 2048, 2048]


@given(st.integers(1, 4096), st.integers(1, 300), st.integers(1, 300), st.integers(2, 4096))
def test_a_step_has_room_and_little_is_wasted(max_tokens, max_rows, num_rows, num_tokens):
    shapes = StepShapes(max_tokens, max_rows, longest=1 << 20)
    shape = shapes.of_prompts(StepKind.ANY, num_tokens, num_rows)
    if num_tokens > most_prompt_tokens(max_tokens) or num_rows > max_rows:
        assert shape is None
        return
    assert shape is not None
    assert num_tokens <= shape.num_tokens <= max_tokens
    assert num_rows <= shape.num_rows <= max_rows
    assert shape.num_tokens < max(17, 2 * num_tokens)
    assert num_tokens < 256 or shape.num_tokens <= 1.25 * num_tokens


def test_padding_fits_its_row_of_pages():
    shapes = StepShapes(64, 8, longest=20)
    assert shapes.of_prompts(StepKind.BASE, 44, 2) == prompt(64, 8, StepKind.BASE)
    assert shapes.of_prompts(StepKind.BASE, 43, 2) is None
    assert {each.num_tokens for each in shapes.usual_prompts()} == {16, 64}, "and the largest"


@pytest.fixture
def computed() -> list[StepShape]:
    return []


@pytest.fixture
def steps(computed) -> RecordedSteps:
    return RecordedSteps(computed.append, Eager, max_prompts=2)


def use(steps: RecordedSteps, shape: StepShape) -> bool:
    if is_taken := steps.takes(shape):
        steps.run(shape)
    return is_taken


def test_prompts_are_recorded_in_idle_time_or_when_they_occur_often(steps, computed):
    decode = StepShape.of_decodes(StepKind.BASE, 4)
    assert use(steps, decode)
    assert not steps.record_wanted(computed.append)
    taken = [use(steps, prompt(64)) for _ in range(LATEST_USE + 1)]
    assert taken == [False] * (LATEST_USE - 1) + [True, True]
    assert computed == [decode, prompt(64), prompt(64)]
    filled: list[StepShape] = []
    assert not use(steps, prompt(16))
    assert steps.record_wanted(filled.append)
    assert filled == [prompt(16)]
    assert not steps.record_wanted(filled.append), "there are no others"
    assert use(steps, prompt(16))


def test_those_that_occurred_last_are_recorded_first(computed):
    steps, filled = RecordedSteps(computed.append, Eager, max_prompts=3), list[StepShape]()
    for num_tokens in (16, 32, 64, 32):
        assert not use(steps, prompt(num_tokens))
    while steps.record_wanted(filled.append):
        pass
    assert filled == [prompt(32), prompt(64), prompt(16)]


def test_the_warm_up_records_the_largest_first(steps):
    filled: list[StepShape] = []
    decode = StepShape.of_decodes(StepKind.BASE, 4)
    steps.record_all([prompt(16), decode, prompt(32), prompt(64)], filled.append)
    assert filled == [prompt(64), prompt(32), decode], "as many as have room"
    assert use(steps, prompt(32))


@given(st.randoms())
def test_all_ranks_record_in_the_same_order(random: Random) -> None:
    """Sets of shapes have another order in each process."""
    shapes = StepShapes(512, 64, longest=512)
    wanted = [*shapes.decodes(), *shapes.usual_prompts()]
    filled: list[list[StepShape]] = []
    for _ in range(2):
        random.shuffle(wanted)
        filled.append([])
        RecordedSteps(lambda shape: None, Eager, 99).record_all(wanted, filled[-1].append)
    assert filled[0] == filled[1]


def test_an_idle_recording_makes_room(steps, computed):
    for num_tokens in (16, 32, 64):
        use(steps, prompt(num_tokens))
        steps.record_wanted(computed.append)
    assert not use(steps, prompt(64)), "both others have just been used"
    for _ in range(IDLE_STEPS):
        assert use(steps, prompt(16))
    assert steps.record_wanted(computed.append)
    assert use(steps, prompt(64)), "in the place of the one that is idle"
    assert use(steps, prompt(16))
    assert not use(steps, prompt(32))


@pytest.mark.parametrize(
    "error", [RecordingFailed("failed"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_recording_that_fails_costs_no_step(computed, error):
    """Others are recorded in the place of idle ones alone. A decode step's error is the start's."""
    is_failing = False

    def record(compute: Compute) -> Eager:
        made = Eager(compute)
        if is_failing:
            raise error
        return made

    steps = RecordedSteps(computed.append, record, max_prompts=9)
    use(steps, prompt(16))
    assert steps.record_wanted(computed.append)
    is_failing = True
    assert not use(steps, prompt(32))
    assert not steps.record_wanted(computed.append)
    is_failing = False
    assert not any(use(steps, prompt(32)) for _ in range(LATEST_USE + 1))
    assert use(steps, prompt(16))
    is_failing = True
    with pytest.raises(RuntimeError):
        steps.run(StepShape.of_decodes(StepKind.BASE, 4))


def test_a_step_is_computed_though_its_recording_fails(computed):
    def record(compute: Compute) -> Eager:
        compute()
        raise RecordingFailed("out of memory")

    steps = RecordedSteps(computed.append, record, max_prompts=9)
    taken = [use(steps, prompt(16)) for _ in range(2 * LATEST_USE)]
    assert taken.count(True) == len(computed) == 1
