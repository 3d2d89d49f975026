"""The Triton kernels, run by Triton's interpreter, against the definition.

The interpreter takes milliseconds per program, so the sweep is thinner than the CPU's; it cannot
multiply bfloat16 tiles, so bfloat16 is left to the GPU tests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise.addend import Addend
from kernels.lora import BASE_SLOT, reference
from kernels.lora.plan import ITEM_NOTHING, ROWS_TOKENS, TILE_TOKENS
from tests.support.kernels.adapters import RATIOS, without_views
from tests.support.pairs import in_turns

DTYPES = [torch.float32, torch.float16]
MIXED_SLOTS = [BASE_SLOT, 0, 1, 1, 2, 3, 4, 5, BASE_SLOT]
MIXED_LENGTHS = [5, 7, 1, TILE_TOKENS + 3, 1, 2, 1, 3, 1]


DECODES = [
    ("distinct", 1, False),
    ("distinct", 7, True),
    ("distinct", 16, False),
    ("uniform", 3, False),
    ("uniform", 16, True),
    ("zipf:1.5", 7, False),
    ("zipf:1.5", 33, True),
    ("identical", 2, False),
    ("identical", 16, True),
    ("skewed", 16, False),
    ("skewed", 33, True),
    ("empty", 7, True),
]


@pytest.mark.parametrize(("popularity", "num_rows", "mixed", "dtype"), in_turns(DECODES, DTYPES))
def test_decode(
    make_adapters, slots_of, interpreter, assert_close, ratio_of, popularity, num_rows, mixed, dtype
):
    adapters = make_adapters(dtype)
    plan = adapters.plan(slots_of(popularity, num_rows, mixed))
    x, out = adapters.inputs(plan)
    got = interpreter.add_lora(adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


@pytest.mark.parametrize(
    ("in_features", "out_features", "dtype"),
    in_turns([(64, (128,)), (1, (1,)), (70, (96, 33, 40)), (1100, (129, 5))], DTYPES),
)
def test_prefill_and_decode_in_one_plan(
    make_adapters, interpreter, assert_close, ratio_of, in_features, out_features, dtype
):
    adapters = make_adapters(dtype, in_features, out_features)
    plan = adapters.plan(MIXED_SLOTS, MIXED_LENGTHS)
    x, out = adapters.inputs(plan)
    got = interpreter.add_lora(adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


BESIDE = [
    (MIXED_SLOTS, MIXED_LENGTHS, {}),
    ([BASE_SLOT, 0, *[4] * 19, 2, 5], [1] * 23, {}),
    ([BASE_SLOT, 0, *[4] * 3, 2, 5], [1] * 7, {"programs": 1, "block_n": 16}),
    ([0, 4], [1, 1], {"whole_ranks": 1}),
]
"""Tiles and rows, one block of columns and several, all ranks at once and one block of them after
the other."""


@pytest.mark.parametrize(("slots", "lengths", "tuned", "in_features"), in_turns(BESIDE, [70, 1100]))
def test_beside_is_bitwise_in_line(make_adapters, interpreter, slots, lengths, tuned, in_features):
    """An addend is of every token with an adapter, 0 where it lacks a target, and its sum with the
    outputs is what adding in line makes of them."""
    adapters = make_adapters(torch.float16, in_features)
    plan, group = adapters.plan(slots, lengths), adapters.group
    x, out = adapters.inputs(plan)
    values = torch.full((plan.num_tokens, group.out_end), torch.nan, dtype=x.dtype)
    values = interpreter.call(
        "compute_addend", values, x, without_views(adapters.table), plan, group, tuned
    )
    base = plan.token_slots == BASE_SLOT
    assert values[base].isnan().all(), "nobody reads these"
    assert values[~base].isfinite().all()
    got = Addend(values, plan.token_slots).added_to(out)
    assert torch.equal(got, interpreter.add_lora(adapters, out, x, plan))
    assert not torch.equal(got, out)


def test_only_where_nothing_is_beside_sums_are_rounded_once(make_adapters, interpreter):
    adapters = make_adapters(torch.float16)
    plan = adapters.plan([0, 4, 5], [1, 1, 1])
    x, out = adapters.inputs(plan)
    once = interpreter.call(
        "add_lora_unrounded", out, x, without_views(adapters.table), plan, adapters.group
    )
    assert not torch.equal(once, interpreter.add_lora(adapters, out, x, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(make_adapters, interpreter, assert_close, ratio_of, dtype):
    adapters = make_adapters(dtype)
    table = adapters.table
    plan = adapters.plan(MIXED_SLOTS, MIXED_LENGTHS)
    token_ids = torch.arange(plan.num_tokens) * 7 % adapters.vocab
    out = torch.randn(plan.num_tokens, adapters.group.out_features[0]).to(dtype)
    expected = out.clone()
    reference.add_lora_embedding(expected, token_ids, table.arena, table, plan, 0)
    got = interpreter.add_lora_embedding(adapters, out, token_ids, plan)
    assert_close("out", expected, got, ratio_of(dtype))


@pytest.mark.parametrize("length", [1, 3], ids=["token", "tile"])
def test_a_row_is_the_same_bits_in_any_batch(make_adapters, interpreter, length):
    adapters = make_adapters(torch.float32, 1100, (40,))
    alone = adapters.plan([4], [length])
    x, out = adapters.inputs(alone)
    expected = interpreter.add_lora(adapters, out, x, alone)
    assert not torch.equal(expected, out)
    mix = adapters.plan([BASE_SLOT, 0, 4, 4, 4, 5], [1, 2, 1, length, 2, 1])
    mixed_x, mixed_out = adapters.inputs(mix, seed=2)
    mixed_x[4 : 4 + length], mixed_out[4 : 4 + length] = x, out
    got = interpreter.add_lora(adapters, mixed_out, mixed_x, mix)
    assert torch.equal(got[4 : 4 + length], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_wherever_it_is_among_rows_of_its_adapter(
    make_adapters, interpreter, dtype
):
    """Alone, and in each place of items that it shares with others."""
    adapters = make_adapters(dtype, 1100, (40,))
    alone = adapters.plan([4], [1])
    x, out = adapters.inputs(alone)
    expected = interpreter.add_lora(adapters, out, x, alone)
    many = adapters.plan([4, BASE_SLOT, *[4] * (ROWS_TOKENS + 3)], [1] * (ROWS_TOKENS + 5))
    many_x, many_out = x.repeat(many.num_tokens, 1), out.repeat(many.num_tokens, 1)
    many_x[5], many_out[5] = 1, 1
    got = interpreter.add_lora(adapters, many_out, many_x, many)
    same = [i for i in range(many.num_tokens) if i not in (1, 5)]
    assert torch.equal(got[same], expected.expand(len(same), -1))
    assert not torch.equal(got[5], expected[0])


def test_splitting_the_input_changes_no_bit(make_adapters, interpreter):
    """Chunks are added in one order, whether by one program or by many and then in expand."""
    adapters = make_adapters(torch.float32, 1100, (40,))
    plan = adapters.plan([0, 2, 4], [1, 3, 1])
    x, out = adapters.inputs(plan)
    split = interpreter.add_lora(adapters, out, x, plan)
    whole = interpreter.add_lora(adapters, out, x, plan, split_tokens=1)
    assert not torch.equal(split, out)
    assert torch.equal(split, whole)


WALKS = {"one block": (1 << 20, 1), "two blocks": (1, 2), "all blocks": (1, 9)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_walk_any_number_of_blocks(make_adapters, interpreter, assert_close, dtype):
    """Blocks of columns end with the columns of their target, and no bit depends on who computes
    them."""
    adapters = make_adapters(dtype)
    plan = adapters.plan(MIXED_SLOTS, [1] * len(MIXED_SLOTS))
    x, out = adapters.inputs(plan)
    found = {
        name: interpreter.add_lora(
            adapters, out, x, plan,
            expand={"block_n": 16, "programs": programs, "max_blocks": max_blocks},
        )
        for name, (programs, max_blocks) in WALKS.items()
    }  # fmt: skip
    for name in WALKS:
        assert torch.equal(found[name], found["one block"]), name
    assert_close("out", adapters.expected(out, x, plan), found["one block"], RATIOS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_beyond_one_block(make_adapters, interpreter, assert_close, dtype):
    adapters = make_adapters(dtype)
    plan = adapters.plan([5, 4, 5, 3], [1] * 4)
    x, out = adapters.inputs(plan)
    got = interpreter.add_lora(adapters, out, x, plan, expand={"whole_ranks": 1})
    assert_close("out", adapters.expected(out, x, plan), got, RATIOS[dtype])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 3, 1]], ids=["decode", "any"])
def test_a_plan_with_room_left_equals_an_exact_one(make_adapters, interpreter, lengths):
    """A recorded step leaves room: base tokens after its own, empty items, every target."""
    adapters = make_adapters(torch.float32)
    plan = adapters.plan([1, 4, 5], lengths)
    roomy = replace(
        plan,
        num_tokens=plan.num_tokens + 3,
        targets=frozenset(range(adapters.table.num_targets)),
        max_rank=adapters.table.max_rank,
        token_slots=F.pad(plan.token_slots, (0, 3), value=BASE_SLOT),
        items=F.pad(plan.items, (0, 0, 0, 3), value=ITEM_NOTHING),
        order=torch.cat([plan.order, torch.arange(3, dtype=torch.int32) + plan.num_tokens]),
    )
    x, out = adapters.inputs(roomy)
    got = interpreter.add_lora(adapters, out, x, roomy)
    n = plan.num_tokens
    assert torch.equal(got[:n], interpreter.add_lora(adapters, out[:n], x[:n], plan))
    assert torch.equal(got[n:], out[n:])
