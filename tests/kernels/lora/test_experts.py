"""Targets that are mixtures of experts: of every item the device reads its expert's place, rank and
scale from the index that a segment begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import lora
from kernels.lora import BASE_SLOT, LoraGroup, LoraPlan, LoraTable, TableEntry, native, reference
from kernels.lora.plan import TILE_TOKENS
from tests.kernels.lora.packing import Packing
from tests.kernels.lora.parts import join, join_native, rank_part
from tests.support.native import native_library

IN, OUT = 70, (40, 33)
EXPERTS, SLOTS = 3, 3
GROUP = LoraGroup((1, 2), IN, (0, OUT[0]), OUT)
MAX_RANK = 33
Ranks = Sequence[Sequence[int]]
"""Of each slot, of each expert; 0: the adapter lacks it."""
MIXED: Ranks = ((3, 0, 33), (0, 0, 0), (8, 8, 1))
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


@dataclass
class Mixture:
    """`dense[slot, target, expert]` is (A, B, scale) as first made. Target 0 is no mixture."""

    table: LoraTable
    dense: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, float]]

    def plan(self, rows: Sequence[tuple[int, int, int]]) -> LoraPlan:
        slots, experts, lengths = zip(*rows, strict=True)
        return LoraPlan.build(slots, lengths, self.table, "cpu", experts)

    def inputs(self, plan: LoraPlan) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(plan.num_tokens, IN, generator=generator)
        out = torch.randn(plan.num_tokens, GROUP.out_end, generator=generator)
        dtype = self.table.arena.dtype
        return x.to(dtype), out.to(dtype)

    def expected(self, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
        out = out.clone()
        reference.add_lora_experts(out, x, self.table.arena, self.table, plan, GROUP)
        return out


def mixture(
    ranks: Ranks, dtype: torch.dtype, *, shares_a: bool = False, part: int = 0, num_parts: int = 1
) -> Mixture:
    """Adapters of these ranks; `shares_a`: experts of one rank share an A, which lies there once.
    Of A there is a part of the ranks."""
    generator = torch.Generator().manual_seed(0)
    packing, dense = Packing(dtype), {}
    rows: list[list[TableEntry]] = []
    for slot, of_slot in enumerate(ranks):
        entries = []
        for target, width in zip(GROUP.targets, OUT, strict=True):
            known: dict[int, torch.Tensor] = {}
            pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
            for expert, rank in enumerate(of_slot):
                a = (torch.randn(rank, IN, generator=generator) * IN**-0.5).to(dtype)
                b = (torch.randn(rank, width, generator=generator)).to(dtype)
                if shares_a:
                    a = known.setdefault(rank, a)
                pairs.append((a, b) if rank else None)
                if rank:
                    dense[slot, target, expert] = (a, b, 0.75 * (1 + expert))
            cut: dict[int, torch.Tensor] = {}
            for a, _ in filter(None, pairs):
                cut.setdefault(id(a), a[rank_part(len(a), part, num_parts)])
            of_a = [None if pair is None else cut[id(pair[0])] for pair in pairs]
            of_a = [a if a is not None and len(a) else None for a in of_a]
            of_b = [None if pair is None else pair[1] for pair in pairs]
            scales = [1.0 + expert for expert in range(len(pairs))]
            entry = TableEntry(
                *(target, packing.place_experts(of_a, [1.0] * len(pairs))),
                *(packing.place_experts(of_b, scales), max(of_slot), IN, width, 0.75),
                a_rank=max((len(a) for a in of_a if a is not None), default=0),
                num_experts=len(pairs),
            )
            entries.append(entry)
        rows.append(entries[: 1 + slot % 2])  # adapters that lack a target, too
    arena = packing.arena()
    table = LoraTable.create(
        *(len(ranks), 1 + len(OUT), arena, "cpu", MAX_RANK), rank_parts=num_parts
    )
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
        for target in set(GROUP.targets) - table.adapters[slot].target_set:
            dense = {key: value for key, value in dense.items() if key[:2] != (slot, target)}
    return Mixture(table, dense)


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
RATIOS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@settings(max_examples=40, deadline=None)
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


def without_views(table: LoraTable) -> LoraTable:
    return replace(table, _weights=tuple({} for _ in table.adapters))


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
    assert [
        [start, count, slot, expert] for start, count, slot, _, expert in plan.items.tolist()
    ] == [
        [0, 3, 0, 2],
        [3, 5, 0, 1],
        [12, 1, 2, 1],
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
