"""The CPU path against the definition, over popularities, batch sizes, ranks and odd widths."""

from __future__ import annotations

import pytest
import torch

from kernels import lora
from kernels.lora import BASE_SLOT, LoraGroup, cpu, reference

pytestmark = pytest.mark.matrix

POPULARITIES = ["distinct", "uniform", "zipf:1.5", "identical", "skewed", "empty"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def add_lora(adapters, out, x, plan, group=None):
    out = out.clone()
    table = adapters.table
    lora.add_lora(out, x, table.arena, table, plan, group or adapters.group)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["adapters", "with-base"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_decode(
    make_adapters, slots_of, assert_close, ratio_of, popularity, num_rows, mixed, dtype
):
    adapters = make_adapters(dtype)
    plan = adapters.plan(slots_of(popularity, num_rows, mixed))
    x, out = adapters.inputs(plan)
    got = add_lora(adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(64, (64, 32)), (1, (1,)), (257, (33, 5, 7)), (1000, (129,))],
    ids=str,
)
def test_prefill_and_decode_in_one_plan(
    make_adapters, assert_close, ratio_of, in_features, out_features, dtype
):
    adapters = make_adapters(dtype, in_features, out_features)
    slots = [BASE_SLOT, 0, 1, 1, 2, 3, 3, 3, 4, 5, BASE_SLOT]
    plan = adapters.plan(slots, [5, 7, 1, 63, 1, 2, 1, 1, 130, 3, 1])
    x, out = adapters.inputs(plan)
    got = add_lora(adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(make_adapters, assert_close, ratio_of, dtype):
    adapters = make_adapters(dtype)
    table = adapters.table
    plan = adapters.plan([BASE_SLOT, 0, 1, 2, 3, 4, 5], [2, 1, 9, 40, 3, 1, 2])
    token_ids = torch.arange(plan.num_tokens) * 7 % adapters.vocab
    expected = torch.randn(plan.num_tokens, adapters.group.out_features[0]).to(dtype)
    got = expected.clone()
    reference.add_lora_embedding(expected, token_ids, table.arena, table, plan, 0)
    lora.add_lora_embedding(got, token_ids, table.arena, table, plan, 0)
    assert_close("out", expected, got, ratio_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_segment_is_the_same_bits_in_any_batch(make_adapters, dtype):
    """Where rows start on 64 bytes, as in every real model: MKL's sums depend on alignment."""
    adapters = make_adapters(dtype, 64, (64, 32))
    alone = adapters.plan([4, 5], [1, 9])
    x, out = adapters.inputs(alone)
    expected = add_lora(adapters, out, x, alone)
    for before, after in ([0, 1, 1], [2]), ([BASE_SLOT], [0, 2, 3]), ([3] * 17, [BASE_SLOT] * 2):
        mix = adapters.plan([*before, 4, 5, *after], [1] * len(before) + [1, 9] + [1] * len(after))
        start = len(before)
        mixed_x, mixed_out = adapters.inputs(mix, seed=2)
        mixed_x[start : start + 10], mixed_out[start : start + 10] = x, out
        got = add_lora(adapters, mixed_out, mixed_x, mix)
        assert torch.equal(got[start : start + 10], expected)


def test_rows_of_one_segment_do_not_depend_on_their_number(make_adapters, assert_close):
    """Only to fp32 rounding: products of one row and of many sum in different orders."""
    adapters = make_adapters(torch.float32)
    plan = adapters.plan([4] * 33)
    x, out = adapters.inputs(plan)
    together = add_lora(adapters, out, x, plan)
    alone = adapters.plan([4])
    rows = [add_lora(adapters, out[t : t + 1], x[t : t + 1], alone) for t in range(33)]
    assert_close("rows", torch.cat(rows), together, 1e-6)


def test_out_may_be_a_part_of_wider_rows(make_adapters, assert_close, ratio_of):
    """The fused outputs of a group are written in place; columns beside them stay."""
    adapters = make_adapters(torch.float32)
    plan = adapters.plan([0, 1, 1, 5, 5, 5, 5, 5], [1] * 8)
    x, out = adapters.inputs(plan)
    group = LoraGroup((2,), adapters.group.in_features, (4,), (33,))
    got = add_lora(adapters, out, x, plan, group)
    expected = out.clone()
    reference.add_lora(expected, x, adapters.table.arena, adapters.table, plan, group)
    assert_close("out", expected, got, ratio_of(torch.float32))
    assert torch.equal(got[:, :4], out[:, :4])
    assert torch.equal(got[:, 37:], out[:, 37:])


def test_an_evicted_slot_adds_nothing(make_adapters):
    adapters = make_adapters(torch.float32, 16, (16,))
    plan = adapters.plan([7])
    x, out = adapters.inputs(plan)
    assert not torch.equal(add_lora(adapters, out, x, plan), out)
    rows, adapter = adapters.table.rows[7].clone(), adapters.table.adapters[7]
    adapters.table.clear_row(7)
    assert torch.equal(add_lora(adapters, out, x, adapters.plan([7])), out)
    adapters.table.rows[7].copy_(rows)
    adapters.table.adapters[7] = adapter


def test_the_switch_of_onednn_is_put_back(make_adapters):
    adapters = make_adapters(torch.bfloat16)
    plan = adapters.plan([0])
    x, out = adapters.inputs(plan)
    enabled = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        cpu.add_lora(out, x.float(), adapters.table, plan, adapters.group)
    assert torch.backends.mkldnn.enabled == enabled


def test_every_entry_is_counted(make_adapters):
    adapters = make_adapters(torch.float32)
    plan = adapters.plan([0])
    x, out = adapters.inputs(plan)
    before = lora.num_calls()
    add_lora(adapters, out, x, plan)
    token_ids = torch.zeros(1, dtype=torch.int64)
    table = adapters.table
    lora.add_lora_embedding(out[:, :96], token_ids, table.arena, table, plan, 0)
    assert lora.num_calls() == before + 2
