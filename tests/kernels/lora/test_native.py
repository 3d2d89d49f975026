"""The C++ operations against the definition, for every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import (
    BASE_SLOT,
    GRANULE_BYTES,
    LoraGroup,
    LoraPlan,
    LoraTable,
    TableEntry,
    native,
    reference,
)
from tests.support.examples import examples

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, (64, 32)), (1, (1,)), (257, (33, 5, 7)), (96, (200, 64, 128)), (1000, (129,))]


@pytest.fixture(autouse=True)
def one_thread():
    """Sharing has a test of its own; elsewhere a loaded machine would be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def add_lora(library, adapters, out, x, plan, group=None):
    out = out.clone()
    native.add_lora(library, out, x, adapters.table, plan, group or adapters.group)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("popularity", ["distinct", "zipf:1.5", "identical", "empty"])
def test_decode(
    library, make_adapters, slots_of, assert_close, ratio_of, popularity, num_rows, dtype
):
    adapters = make_adapters(dtype)
    plan = adapters.plan(slots_of(popularity, num_rows, mixed=num_rows % 2 == 1))
    x, out = adapters.inputs(plan)
    got = add_lora(library, adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES, ids=str)
def test_prefill_and_decode_in_one_plan(
    library, make_adapters, assert_close, ratio_of, in_features, out_features, dtype
):
    adapters = make_adapters(dtype, in_features, out_features)
    slots = [BASE_SLOT, 0, 1, 1, 2, 3, 0, 3, 4, 5, BASE_SLOT]
    plan = adapters.plan(slots, [5, 7, 1, 63, 1, 2, 1, 1, 130, 3, 1])
    x, out = adapters.inputs(plan)
    got = add_lora(library, adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(library, make_adapters, assert_close, ratio_of, dtype):
    adapters = make_adapters(dtype)
    table = adapters.table
    plan = adapters.plan([BASE_SLOT, 0, 1, 2, 3, 4, 5, 0], [2, 1, 9, 40, 3, 1, 2, 5])
    token_ids = torch.arange(plan.num_tokens) * 7 % adapters.vocab
    expected = torch.randn(plan.num_tokens, adapters.group.out_features[0]).to(dtype)
    got = expected.clone()
    reference.add_lora_embedding(expected, token_ids, table.arena, table, plan, 0)
    native.add_lora_embedding(library, got, token_ids, table, plan, 0)
    assert_close("out", expected, got, ratio_of(dtype))


def test_logits_of_a_bf16_model_may_be_fp32(library, make_adapters, assert_close):
    adapters = make_adapters(torch.bfloat16)
    plan = adapters.plan([0, 1, BASE_SLOT, 1, 4, 5, 5])
    x, out = adapters.inputs(plan)
    out = out.float()
    got = add_lora(library, adapters, out, x, plan)
    expected = adapters.expected(out, x, plan)
    assert_close("out", expected, got, 3e-3)
    assert_close("added", expected - out, got - out, 3e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 7, 12, 31, 128, 255, 256, 300])
def test_any_rank(library, assert_close, ratio_of, rank, dtype):
    table, group = one_adapter(rank, 160, 136, dtype)
    plan = LoraPlan.build([0, BASE_SLOT, 0], [1, 2, 70], table, "cpu")
    x, out = torch.randn(73, 160).to(dtype), torch.randn(73, 136).to(dtype)
    expected, got = out.clone(), out.clone()
    reference.add_lora(expected, x, table.arena, table, plan, group)
    native.add_lora(library, got, x, table, plan, group)
    # Rounding errors of the rows between the products add up like the rows themselves.
    assert_close("out", expected, got, ratio_of(dtype))


def one_adapter(rank: int, num_in: int, num_out: int, dtype: torch.dtype):
    """A table of one adapter that has target 0; beyond its weights the arena is NaN."""
    torch.manual_seed(rank)
    a = torch.randn(rank, num_in) * num_in**-0.5
    b = torch.randn(rank, num_out) * rank**-0.5
    arena = torch.full((2**19 // dtype.itemsize,), torch.nan, dtype=dtype)
    arena[: a.numel()] = a.flatten()
    b_granule = 2**18 // GRANULE_BYTES
    start = 2**18 // dtype.itemsize
    assert a.numel() <= start
    arena[start : start + b.numel()] = b.flatten()
    table = LoraTable.create(1, 1, arena, "cpu", max_rank=rank)
    table.set_row(0, [TableEntry(0, 0, b_granule, rank, num_in, num_out)])
    return table, LoraGroup((0,), num_in, (0,), (num_out,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_high_ranks_give_the_same_bits_to_any_number_of_tokens(library, dtype):
    """Also where B is too long to be packed, and inputs, ranks and columns end within a tile. Sums
    in fp32 show more than rounded ones."""
    differ = []
    for rank in (65, 66, 95, 96, 97, 127, 128, 129, 161, 255, 256, 257, 287, 320):
        table, group = one_adapter(rank, 151, 137, dtype)
        x, together = torch.randn(40, 151).to(dtype), torch.zeros(40, 137)
        plan = LoraPlan.build([0], [40], table, "cpu")
        native.add_lora(library, together, x, table, plan, group)
        for number, first in product((1, 2, 3, 16, 17), (0, 11, 23)):
            tokens, got = slice(first, first + number), torch.zeros(number, 137)
            plan = LoraPlan.build([0], [number], table, "cpu")
            native.add_lora(library, got, x[tokens], table, plan, group)
            if not torch.equal(got, together[tokens]):
                differ.append(f"rank {rank}: {number} tokens from {first} on")
    assert not differ


ROWS = st.lists(
    st.tuples(st.integers(BASE_SLOT, 8), st.sampled_from([1, 1, 1, 2, 5, 70])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(30), deadline=None)
@given(rows=ROWS, dtype=st.sampled_from(DTYPES))
def test_a_row_is_the_same_bits_alone_and_in_any_batch(library, make_adapters, rows, dtype):
    """Also where it is prefilled in one run, in pieces, or token by token."""
    adapters = make_adapters(dtype)
    plan = adapters.plan(*zip(*rows, strict=True))
    x, out = adapters.inputs(plan)
    together = add_lora(library, adapters, out, x, plan)
    start = 0
    for slot, length in rows:
        for piece in {0, length // 2, length - 1}:
            at = slice(start + piece, start + length)
            alone = adapters.plan([slot], [length - piece])
            got = add_lora(library, adapters, out[at], x[at], alone)
            assert torch.equal(got, together[at])
        start += length


@pytest.mark.parametrize("exponent", [-42, -43, -44, -62])
def test_tiny_numbers_are_the_same_bits_however_many_tokens_there_are(library, exponent):
    """Few tokens may be multiplied by vectors and many by tiles, to which denormals are zero."""
    tiny = 2.0**exponent
    arena = torch.zeros(64 * GRANULE_BYTES // 2, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    arena[: 2 * 2048] = (torch.randn(2 * 2048, generator=generator) * tiny).bfloat16()
    table = LoraTable.create(1, 1, arena, "cpu", max_rank=32)
    table.set_row(0, [TableEntry(0, 0, 16, 32, 64, 64, scale=1.0)])
    group = LoraGroup((0,), 64, (0,), (64,))
    x = (torch.randn(1, 64, generator=generator) * tiny).bfloat16().expand(20, 64).contiguous()
    rows = set()
    for count in (1, 2, 3, 16, 20):
        out = torch.zeros(count, 64, dtype=torch.bfloat16)
        native.add_lora(
            library, out, x[:count], table, LoraPlan.build([0], [count], table, "cpu"), group
        )
        rows |= {row.numpy().tobytes() for row in out.view(torch.int16)}
    assert len(rows) == 1


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_bit(library, make_adapters, num_threads):
    adapters = make_adapters(torch.bfloat16)
    plan = adapters.plan([0, 1, 2, 3, 4, 4], [1, 1, 70, 1, 1, 1])
    x, out = adapters.inputs(plan)
    expected = add_lora(library, adapters, out, x, plan)
    torch.set_num_threads(num_threads)
    assert torch.equal(add_lora(library, adapters, out, x, plan), expected)


def test_out_may_be_a_part_of_wider_rows(library, make_adapters, assert_close, ratio_of):
    adapters = make_adapters(torch.float32)
    plan = adapters.plan([0, 1, 1, 5, 5, 5, 5, 5])
    x, out = adapters.inputs(plan)
    group = LoraGroup((2,), adapters.group.in_features, (4,), (33,))
    got = add_lora(library, adapters, out, x, plan, group)
    expected = out.clone()
    reference.add_lora(expected, x, adapters.table.arena, adapters.table, plan, group)
    assert_close("out", expected, got, ratio_of(torch.float32))
    assert torch.equal(got[:, :4], out[:, :4])
    assert torch.equal(got[:, 37:], out[:, 37:])


def test_a_program_follows_its_plan(library, make_adapters, assert_close, ratio_of):
    """One program, whatever the batch: it reads the plan and the table anew each time."""
    adapters = make_adapters(torch.float32)
    group, table = adapters.group, adapters.table
    plan = native.NativeLoraPlan(max_tokens=100)
    x, out = torch.empty(100, group.in_features), torch.empty(100, group.out_end)
    lora = native.NativeLora.create(table, plan)
    program = library.program(lora.add_ops(group, x, out))
    for slots, lengths in ([3, 1, 3], [1, 1, 1]), ([BASE_SLOT], [100]), ([2, 6], [7, 93]):
        reference_plan = adapters.plan(slots, lengths)
        plan.fill(slots, lengths)
        assert plan.has_adapters == reference_plan.has_adapters
        num_tokens = reference_plan.num_tokens
        x.fill_(torch.nan)
        out.fill_(torch.nan)
        x[:num_tokens], out[:num_tokens] = adapters.inputs(reference_plan)
        expected = adapters.expected(out[:num_tokens], x[:num_tokens], reference_plan)
        program.run()
        assert_close("out", expected, out[:num_tokens], ratio_of(torch.float32))
        assert out[num_tokens:].isnan().all()
    rows, before = table.rows.clone(), out.clone()
    table.rows.zero_()
    program.run()
    table.rows.copy_(rows)
    assert torch.equal(out, before), "evicted adapters add nothing"


def tokens_of_items(plan: native.NativeLoraPlan) -> list[tuple[int, list[int]]]:
    """(slot, tokens) of each item."""
    tokens = plan.tokens.tolist()
    return [(slot, tokens[first : first + count]) for first, count, slot, *_ in plan.items.tolist()]


@given(rows=ROWS)
def test_items_hold_every_token_of_a_slot_once(rows: Sequence[tuple[int, int]]) -> None:
    slots, lengths = zip(*rows, strict=True)
    of_token = np.repeat(slots, lengths)
    plan = native.NativeLoraPlan(len(of_token))
    plan.fill(slots, lengths)
    for slot in set(slots):
        items = [tokens for item_slot, tokens in tokens_of_items(plan) if item_slot == slot]
        expected = [] if slot == BASE_SLOT else np.flatnonzero(of_token == slot).tolist()
        assert [token for tokens in items for token in tokens] == expected
        assert len(items) == -(-len(expected) // 64), "as few reads of A and B as can be"
