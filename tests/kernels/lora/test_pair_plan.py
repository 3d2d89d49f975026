"""Plans of pairs: the definition against plans that the host makes of the same rows, the device
against the definition, and what adapters then add to pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import lora
from kernels.experts import own_pairs, sort_pairs
from kernels.lora import BASE_SLOT, LoraPlan, LoraTable, TokenOrder, reference
from kernels.lora.plan import ITEM_NOTHING, ITEM_ROWS, ITEM_TILE, ROWS_TOKENS, TILE_TOKENS
from kernels.lora.table import MixPart
from tests.support.examples import examples
from tests.support.kernels.adapters import without_views
from tests.support.kernels.mixtures import EXPERTS, GROUP, MIXED, RATIOS, mixture

NUM_SLOTS = 4


def table() -> LoraTable:
    return LoraTable.create(NUM_SLOTS, 1, torch.zeros(1024), "cpu", max_rank=8)


def chosen_experts(num_tokens: int, num_experts: int, num_chosen: int, seed: int) -> torch.Tensor:
    """Returns different experts of each token, int32 [T, num_chosen]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort()[:, :num_chosen].int()


def planned(
    plan: LoraPlan, experts: torch.Tensor, num_experts: int, num_slots: int | None = None
) -> tuple[TokenOrder, LoraPlan]:
    order = lora.order_tokens(plan, num_slots)
    return order, lora.plan_pairs(
        plan, order, experts, sort_pairs(experts, num_experts, order.tokens)
    )


def of_rows(rows: Sequence[tuple[int, int]]) -> LoraPlan:
    return LoraPlan.build(*zip(*rows, strict=True), table(), "cpu")


def test_items_are_of_one_expert_slot_and_kind():
    """Of one expert a row of one token, then two longer ones of one slot and base rows among
    them; of another the longer rows alone."""
    rows = [(1, 5), (BASE_SLOT, 2), (1, 1), (1, 3), (0, 2)]
    experts = torch.zeros(13, 1, dtype=torch.int32)
    experts[:5] = 2
    order, plan = planned(of_rows(rows), experts, 3)
    assert order.tokens.tolist() == [5, 6, 11, 12, 7, 0, 1, 2, 3, 4, 8, 9, 10]
    items = [[2, 2, 0, ITEM_TILE, 0], [4, 1, 1, ITEM_ROWS, 0], [5, 3, 1, ITEM_TILE, 0]]
    items.append([8, 5, 1, ITEM_TILE, 2])
    assert plan.items[:4].tolist() == items
    assert not plan.items[4:].any()
    assert plan.token_slots.tolist() == [-1, -1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert plan.token_experts.tolist() == [0] * 8 + [2] * 5
    assert [segment[:] for segment in plan.segments] == [(2, 4, 0, 0), (4, 8, 1, 0), (8, 13, 1, 2)]


def test_long_runs_are_cut_into_tiles():
    experts = torch.zeros(2 * TILE_TOKENS + 3, 1, dtype=torch.int32)
    _, plan = planned(of_rows([(BASE_SLOT, 2), (3, 2 * TILE_TOKENS + 1)]), experts, 1)
    spans = [(2, TILE_TOKENS - 2), (TILE_TOKENS, TILE_TOKENS), (2 * TILE_TOKENS, 3)]
    found = [tuple(item[:2]) for item in plan.items.tolist() if item[3] != ITEM_NOTHING]
    assert found == spans


def test_rows_of_one_token_share_items_per_expert():
    rows = [(0, 1), (BASE_SLOT, 1), *[(2, 1)] * ROWS_TOKENS, (0, 1)]
    experts = torch.tensor([[1, 0], [0, 1], *[[0, 1]] * ROWS_TOKENS, [2, 1]], dtype=torch.int32)
    _, plan = planned(of_rows(rows), experts, 3)
    assert not plan.has_tiles
    # Of expert 0 a base row, 1 of slot 0 and 16 of slot 2; of expert 1 one of slot 0 more.
    items = [
        *([1, 1, 0, ITEM_ROWS, 0], [2, 14, 2, ITEM_ROWS, 0], [16, 2, 2, ITEM_ROWS, 0]),
        *([19, 2, 0, ITEM_ROWS, 1], [21, 11, 2, ITEM_ROWS, 1], [32, 5, 2, ITEM_ROWS, 1]),
        [37, 1, 0, ITEM_ROWS, 2],
    ]
    assert plan.items[: len(items)].tolist() == items
    assert not plan.items[len(items) :].any()


STEPS = st.lists(
    st.tuples(st.integers(BASE_SLOT, NUM_SLOTS - 1), st.sampled_from([1, 1, 1, 2, 5, 40, 130])),
    min_size=1,
    max_size=9,
)
CHOICES = st.sampled_from([(1, 1), (3, 2), (3, 3), (8, 2)])


@settings(deadline=None, max_examples=examples(60))
@given(rows=STEPS, choice=CHOICES, seed=st.integers(0, 99), knows_slots=st.booleans())
def test_the_definition_plans_the_rows_that_the_host_would(rows, choice, seed, knows_slots):
    """Pairs in that order, each given as a row of its own, or with those of its expert."""
    plan = of_rows(rows)
    num_slots = len({slot for slot, length in rows if length > 1}) if knows_slots else None
    experts = chosen_experts(plan.num_tokens, *choice, seed)
    order, found = planned(plan, experts, choice[0], num_slots)
    tokens = sort_pairs(experts, choice[0], order.tokens).tokens
    lengths = torch.tensor([length for _, length in rows])
    is_long = (lengths > 1).repeat_interleave(lengths)[tokens]
    runs: list[list[int]] = []
    for key in zip(
        found.token_slots.tolist(), found.token_experts.tolist(), is_long.tolist(), strict=True
    ):
        if runs and key[2] and runs[-1][:3] == [*key]:
            runs[-1][3] += 1
        else:
            runs.append([*key, 1])
    covered = torch.full((len(tokens),), ITEM_NOTHING)
    for start, count, slot, kind, expert in found.items.tolist():
        if kind != ITEM_NOTHING:
            whole = slice(start, start + count)
            assert count <= (TILE_TOKENS if kind == ITEM_TILE else ROWS_TOKENS)
            assert (found.token_slots[whole] == slot).all()
            assert (found.token_experts[whole] == expert).all()
            assert not covered[whole].any(), "twice"
            covered[whole] = kind
    kinds = torch.where(is_long, ITEM_TILE, ITEM_ROWS)
    assert torch.equal(covered, kinds.masked_fill(found.token_slots == BASE_SLOT, ITEM_NOTHING))
    host = LoraPlan.build(*zip(*((s, n) for s, _, _, n in runs), strict=True), table(), "cpu",
                          [e for _, e, _, _ in runs])  # fmt: skip
    assert found.segments == host.segments
    assert torch.equal(found.token_slots, host.token_slots)


@settings(deadline=None, max_examples=10)
@given(
    rows=STEPS,
    choice=CHOICES,
    seed=st.integers(0, 99),
    knows_slots=st.booleans(),
    chunk=st.sampled_from([64, 128, 2048]),
)
def test_a_device_plans_the_same(interpreter, rows, choice, seed, knows_slots, chunk):
    plan = of_rows(rows)
    num_slots = len({slot for slot, length in rows if length > 1}) if knows_slots else None
    experts = chosen_experts(plan.num_tokens, *choice, seed)
    order, wanted = planned(plan, experts, choice[0], num_slots)
    found_order, pairs, found = interpreter.call(
        *("plan_pairs", plan, experts, choice[0], num_slots), block=64, chunk=chunk
    )
    for name in ("tokens", "keys"):
        assert torch.equal(getattr(found_order, name), getattr(order, name)), name
    assert found_order[2:] == order[2:]
    assert torch.equal(pairs.tokens, sort_pairs(experts, choice[0], order.tokens).tokens)
    for name in ("items", "token_slots", "token_experts"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype == torch.int32, name
        assert torch.equal(one, other), name
    assert found.segments == (), "for CPUs alone"
    assert (found.num_tokens, found.has_tiles) == (wanted.num_tokens, wanted.has_tiles)


@pytest.mark.parametrize("own", [(0, 3), (3, 8), (7, 8)])
@pytest.mark.parametrize("rows", [[(0, 1), (2, 1), (BASE_SLOT, 1)], [(0, 70), (2, 1), (1, 9)]])
def test_a_device_plans_the_pairs_of_some_experts(interpreter, rows, own):
    """Places behind them have no adapter, and no items."""
    plan, (first, end) = of_rows(rows), own
    experts = chosen_experts(plan.num_tokens, 8, 2, 1)
    order = lora.order_tokens(plan)
    pairs = own_pairs(sort_pairs(experts, 8, order.tokens), own)
    wanted, num_own = lora.plan_pairs(plan, order, experts, pairs), len(pairs.tokens)
    *_, found = interpreter.call("plan_pairs", plan, experts, 8, None, own)
    for name in ("token_slots", "token_experts"):
        assert torch.equal(getattr(found, name)[:num_own], getattr(wanted, name)), name
    assert (found.token_slots[num_own:] == BASE_SLOT).all()
    assert torch.equal(found.items, wanted.items)
    assert (wanted.items[:, 4] < end - first).all()


@pytest.mark.parametrize(
    "rows", [[(0, 1), (2, 1), (BASE_SLOT, 1), (0, 1)], [(0, 70), (2, 1), (BASE_SLOT, 3), (2, 9)]]
)
def test_adapters_of_pairs(interpreter, assert_close, rows):
    """Products of a plan that the device has made are those of the definition's."""
    made = mixture(MIXED, torch.float32, shares_a=True)
    step = LoraPlan.build(*zip(*rows, strict=True), made.table, "cpu")
    experts = chosen_experts(step.num_tokens, EXPERTS, 2, 0)
    _, plan = planned(step, experts, EXPERTS)
    x, out = made.inputs(plan)
    wanted, got = made.expected(out, x, plan), out.clone()
    lora.add_lora_experts(got, x, made.table.arena, made.table, plan, GROUP)
    assert_close("tensors", wanted, got, RATIOS[torch.float32])
    assert not torch.equal(wanted, out)
    *_, found = interpreter.call("plan_pairs", replace(step, segments=()), experts, EXPERTS, None)
    got = interpreter.call("add_lora", out, x, without_views(made.table), found, GROUP)
    assert_close("interpreted", wanted, got, RATIOS[torch.float32])


def test_sums_of_adapters_of_pairs(interpreter, assert_close):
    """A sum's slot is that of its first row, of pairs as of tokens."""
    made = mixture(MIXED, torch.float32)
    adapters, arena = made.table.adapters, made.table.arena
    num_slots, num_targets = len(MIXED), made.table.num_targets
    summed = LoraTable.create(num_slots, num_targets, arena, "cpu", 64, num_mixes=1)
    for slot in range(num_slots):
        summed.set_row(slot, adapters[slot])
    summed.set_mix(num_slots, [MixPart(0, 1.0), MixPart(2, 0.5)])
    step = LoraPlan.build([num_slots, 2, BASE_SLOT, num_slots], [70, 1, 3, 1], summed, "cpu")
    assert step.has_mixes
    experts = chosen_experts(step.num_tokens, EXPERTS, 2, 0)
    _, plan = planned(step, experts, EXPERTS)
    x, out = made.inputs(plan)
    wanted = out.clone()
    reference.add_lora_experts(wanted, x, arena, summed, plan, GROUP)
    got = interpreter.call("add_lora", out, x, without_views(summed), plan, GROUP)
    assert_close("out", wanted, got, RATIOS[torch.float32])
    assert not torch.equal(wanted, out)
