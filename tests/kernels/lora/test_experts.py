"""Targets that are mixtures of experts: of every item the device reads its expert's place, rank and
scale from the index that a segment begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import lora
from kernels.lora import BASE_SLOT, LoraPlan, LoraTable, native, reference
from kernels.lora.plan import TILE_TOKENS
from tests.support.examples import examples
from tests.support.kernels.adapters import without_views
from tests.support.kernels.mixtures import EXPERTS, GROUP, MIXED, OUT, RATIOS, SLOTS, mixture
from tests.support.kernels.parts import join, join_native
from tests.support.native import native_library

ROWS = [
    *((BASE_SLOT, 0, 2), (0, 0, 1), (0, 0, 5), (0, 1, 3), (0, 2, TILE_TOKENS + 3), (1, 2, 2)),
    *((2, 0, 1), (2, 1, 1), (2, 1, 1), (2, 2, 4), (BASE_SLOT, 2, 1)),
]
"""Slot, expert and number of pairs."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shares_a", [False, True])
def test_the_definition_is_dense_maths(shares_a):
    made = mixture(MIXED, torch.float32, shares_a=shares_a)
    plan = made.plan(ROWS)
    x, out = made.inputs(plan)
    expected = out.double()
    slots, experts = plan.token_slots.tolist(), plan.token_experts.tolist()
    for t, (slot, expert) in enumerate(zip(slots, experts, strict=True)):
        for target, o, n in zip(GROUP.targets, GROUP.out_offsets, OUT, strict=True):
            if (slot, target, expert) in made.dense:
                a, b, scale = made.dense[slot, target, expert]
                expected[t, o : o + n] += scale * (x[t].double() @ a.double().T @ b.double())
    assert {(0, 1, 0), (0, 1, 2), (2, 1, 1)} <= made.dense.keys(), "what the rows are about"
    torch.testing.assert_close(made.expected(out, x, plan).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_shared_a_takes_its_bytes_once():
    apart, shared = (mixture(MIXED, torch.float32, shares_a=each).table for each in (False, True))
    assert shared.weights(2, 0)[1].a.data_ptr() == shared.weights(2, 1)[1].a.data_ptr()
    assert shared.arena.numel() < apart.arena.numel()


RANKS = st.tuples(*[st.tuples(*[st.sampled_from([0, 0, 1, 3, 8, 33])] * EXPERTS)] * SLOTS)
PAIRS = st.lists(
    st.tuples(
        st.integers(BASE_SLOT, SLOTS - 1),
        st.integers(0, EXPERTS - 1),
        st.sampled_from([1, 1, 1, 2, 5, 70]),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=examples(40), deadline=None)
@given(ranks=RANKS, rows=PAIRS, dtype=st.sampled_from(list(RATIOS)), shares_a=st.booleans())
def test_any_mixture_on_a_cpu(assert_close, ranks, rows, dtype, shares_a):
    made = mixture(ranks, dtype, shares_a=shares_a)
    plan, table = made.plan(rows), made.table
    x, out = made.inputs(plan)
    expected = made.expected(out, x, plan)
    of_tensors, of_native = out.clone(), out.clone()
    lora.add_lora_experts(of_tensors, x, table.arena, table, plan, GROUP)
    assert_close("tensors", expected, of_tensors, RATIOS[dtype])
    native.add_lora_experts(native_library(), of_native, x, table, plan, GROUP)
    assert_close("native", expected, of_native, RATIOS[dtype])
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(of_native[base], out[base])
    assert torch.equal(of_tensors[base], out[base])


@pytest.mark.parametrize("dtype", RATIOS, ids=str)
def test_native(library, assert_close, dtype):
    made = mixture(MIXED, dtype)
    plan = made.plan(ROWS)
    x, out = made.inputs(plan)
    got = out.clone()
    native.add_lora_experts(library, got, x, made.table, plan, GROUP)
    assert_close("out", made.expected(out, x, plan), got, RATIOS[dtype])


def test_native_pairs_may_stand_in_any_order(library):
    """A token's bits are those of any other batch; a plan gathers what shares a slot and expert."""
    made = mixture(MIXED, torch.bfloat16)
    rows = [row for row in ROWS if row[2] < TILE_TOKENS]
    pairs = [(slot, expert, 1) for slot, expert, length in rows for _ in range(length)]
    sorted_plan = made.plan(pairs)
    x, out = made.inputs(sorted_plan)
    expected, got = out.clone(), out.clone()
    native.add_lora_experts(library, expected, x, made.table, sorted_plan, GROUP)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(3))
    plan = made.plan([pairs[i] for i in order.tolist()])
    mixed = got[order].contiguous()
    native.add_lora_experts(library, mixed, x[order].contiguous(), made.table, plan, GROUP)
    assert torch.equal(mixed, expected[order])
    assert not torch.equal(mixed, out[order])


@settings(max_examples=12, deadline=None)
@given(ranks=RANKS, rows=PAIRS.filter(lambda rows: sum(row[2] for row in rows) < 100))
def test_any_mixture_in_triton(interpreter, assert_close, ranks, rows):
    made = mixture(ranks, torch.float32, shares_a=True)
    plan = made.plan(rows)
    x, out = made.inputs(plan)
    got = interpreter.call("add_lora", out, x, without_views(made.table), plan, GROUP)
    assert_close("out", made.expected(out, x, plan), got, RATIOS[torch.float32])
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton(interpreter, assert_close, ratio_of, dtype):
    made = mixture(MIXED, dtype)
    plan = made.plan(ROWS)
    x, out = made.inputs(plan)
    got = interpreter.call("add_lora", out, x, without_views(made.table), plan, GROUP)
    assert_close("out", made.expected(out, x, plan), got, ratio_of(dtype))


@pytest.mark.parametrize("num_parts", [2, 4])
def test_devices_that_share_the_ranks_of_experts(library, interpreter, num_parts):
    made = mixture(MIXED, torch.float32, shares_a=True)
    plan = made.plan(ROWS)
    x, out = made.inputs(plan)
    tables = [
        mixture(MIXED, torch.float32, shares_a=True, part=part, num_parts=num_parts).table
        for part in range(num_parts)
    ]
    ys = [reference.shrink(x, table.arena, table, plan, GROUP) for table in tables]
    y, last = join(ys, tables, plan, GROUP.targets), tables[-1]
    got = out.clone()
    reference.expand(got, y, last.arena, last, plan, GROUP)
    torch.testing.assert_close(got, made.expected(out, x, plan), rtol=1e-5, atol=1e-5)

    ys = [interpreter.half("shrink", x, table, plan, GROUP) for table in tables]
    y = join(ys, tables, plan, GROUP.targets)
    whole = interpreter.call("add_lora", out, x, without_views(made.table), plan, GROUP)
    assert torch.equal(interpreter.half("expand", out, last, plan, y, GROUP), whole)

    expected, got = out.clone(), out.clone()
    native.add_lora_experts(library, expected, x, made.table, plan, GROUP)
    devices = [of_experts(table, plan) for table in tables]
    for device in devices:
        library.run(device.shrink_op(GROUP, x))
    joined = of_experts(last, plan)
    join_native(joined, devices, GROUP.targets)
    library.run(joined.expand_op(GROUP, got))
    assert torch.equal(got, expected)


def of_experts(table: LoraTable, plan: LoraPlan) -> native.NativeLora:
    native_plan = native.NativeLoraPlan(plan.num_tokens, has_experts=True)
    slots, experts = plan.token_slots.tolist(), plan.token_experts.tolist()
    native_plan.fill(slots, row_experts=experts)
    return native.NativeLora.create(table, native_plan, len(GROUP.targets))


def test_items_and_segments_are_of_one_expert():
    made = mixture(MIXED, torch.float32)
    plan = made.plan([(0, 2, 3), (0, 1, 3), (0, 1, 2), (BASE_SLOT, 1, 4), (2, 1, 1)])
    assert [segment[:] for segment in plan.segments] == [(0, 3, 0, 2), (3, 8, 0, 1), (12, 13, 2, 1)]
    assert plan.order.tolist() == [8, 9, 10, 11, 3, 4, 5, 6, 7, 12, 0, 1, 2]
    assert [
        [start, count, slot, expert] for start, count, slot, _, expert in plan.items.tolist()
    ] == [
        [4, 5, 0, 1],
        [9, 1, 2, 1],
        [10, 3, 0, 2],
    ]
    assert plan.token_experts.tolist() == [2] * 3 + [1] * 10
    assert plan.has_group(GROUP)


def test_plain_plans_and_those_of_mixtures_are_not_mixed_up():
    made = mixture(MIXED, torch.float32)
    plan, table = made.plan(ROWS), made.table
    x, out = made.inputs(plan)
    with pytest.raises(AssertionError):
        lora.add_lora(out, x, table.arena, table, plan, GROUP)
    plain = replace(plan, token_experts=None)
    with pytest.raises(AssertionError, match="each token has an expert"):
        lora.add_lora_experts(out, x, table.arena, table, plain, GROUP)
    with pytest.raises(AssertionError, match="expert 3"):
        table.weights(0, 3)
