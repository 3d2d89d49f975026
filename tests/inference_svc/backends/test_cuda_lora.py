"""Plans refilled at fixed addresses say what plans made anew say, and recorded steps see them. Here
torch computes; `tests/gpu` has the kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.core import BASE_SLOT, BatchRow
from kernels.lora.plan import ITEM_NOTHING, TILE_TOKENS, LoraPlan
from tests.support.gpu.lora import (
    DTYPES,
    MAX_ROWS,
    MAX_TOKENS,
    NUM_SLOTS,
    WIDTHS,
    Bench,
    check_later_writes,
    check_longer_rows,
    check_replays,
    rows_of,
)


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRow]:
    """Rows of one slot are neighbours, in any order of slots; some cross their adapters'
    activation."""
    order = draw(st.permutations(range(BASE_SLOT, NUM_SLOTS)))
    lengths = st.lists(st.integers(1, 2 * TILE_TOKENS + 2) | st.just(1), max_size=4)
    rows = [(slot, length) for slot in order for length in draw(lengths)]
    kept: list[tuple[int, int]] = []
    for slot, length in rows[:MAX_ROWS]:
        if sum(n for _, n in kept) + length <= MAX_TOKENS:
            kept.append((slot, length))
    assume(kept)
    samples = draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))
    activations = [  # a row that samples ends behind it
        draw(st.just(0) | st.integers(0, length - is_sampling))
        for (_, length), is_sampling in zip(kept, samples, strict=True)
    ]
    return rows_of(*zip(*kept, strict=True), samples, activations)


@pytest.fixture(scope="module")
def shared() -> Bench:
    return Bench()


def assert_same(got: LoraPlan, wanted: LoraPlan) -> None:
    assert (got.num_tokens, got.segments) == (wanted.num_tokens, wanted.segments)
    assert got.targets >= wanted.targets
    assert got.max_rank >= wanted.max_rank
    assert got.has_tiles == wanted.has_tiles
    assert torch.equal(got.items, wanted.items)
    assert torch.equal(got.token_slots, wanted.token_slots)


@given(batch=batches())
def test_filled_plan_equals_a_new_plan(shared: Bench, batch: list[BatchRow]) -> None:
    """Whatever was filled before, and at the same addresses."""
    wanted = shared.anew(batch)
    assert shared.fill(batch) == (wanted is not None)
    if wanted is not None:
        got = shared.lora.step()
        assert_same(got.plan, wanted.plan)
        assert_same(got.head_plan, wanted.head_plan)
        at = [tensor.data_ptr() for tensor in (got.plan.items, got.plan.token_slots)]
        fixed = shared.lora.padded_step(StepShape.of_decodes(StepKind.LORA, 1)).plan
        assert at == [fixed.items.data_ptr(), fixed.token_slots.data_ptr()]


@given(slots=st.lists(st.integers(BASE_SLOT, NUM_SLOTS - 1), max_size=12), spare=st.integers(0, 4))
def test_decode_step_holds_every_batch_of_its_size(
    shared: Bench, slots: list[int], spare: int
) -> None:
    """What its rows do not use is base, and nothing; it claims every target, for all launches."""
    rows = rows_of(sorted([*slots, 2]))
    wanted = shared.anew(rows)
    assert wanted is not None
    shared.fill(rows_of([3] * MAX_ROWS))
    shared.fill(rows)
    plan, size = (
        shared.lora.padded_step(StepShape.of_decodes(StepKind.LORA, len(rows) + spare)).plan,
        len(rows) + spare,
    )
    assert plan.num_tokens == len(plan.token_slots) == size
    assert plan.targets == frozenset(range(len(WIDTHS)))
    assert not plan.has_tiles
    assert plan.token_slots.tolist() == wanted.plan.token_slots.tolist() + [BASE_SLOT] * spare
    num_items = len(wanted.plan.items)
    assert torch.equal(plan.items[:num_items], wanted.plan.items)
    assert (plan.items[num_items:] == ITEM_NOTHING).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replay_is_bitwise_a_new_plan(dtype: torch.dtype) -> None:
    check_replays(Bench(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_longer_rows_are_bitwise_a_new_plan(dtype: torch.dtype) -> None:
    check_longer_rows(Bench(dtype))


def test_replay_sees_later_table_writes() -> None:
    check_later_writes(Bench(torch.float16))
