"""The definition against the same thing said differently: dense matrices apart from the arena."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import BASE_SLOT, reference

ROWS = ([BASE_SLOT, 0, 1, 2, 3, 4, 5], [4, 3, 1, 1, 2, 1, 5])


def dense_row(adapters, out, x, slot):
    """out + scale * B.T (A x) in float64, per target that the adapter has."""
    out = out.double()
    group = adapters.group
    for target, o, n in zip(group.targets, group.out_offsets, group.out_features, strict=True):
        if (slot, target) in adapters.dense:
            a, b, scale = adapters.dense[slot, target]
            out[o : o + n] += scale * (b.double().T @ (a.double() @ x.double()))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_add_lora(make_adapters, assert_close, dtype):
    adapters = make_adapters(dtype)
    plan = adapters.plan(*ROWS)
    x, out = adapters.inputs(plan)
    rows = zip(out, x, plan.token_slots.tolist(), strict=True)
    expected = torch.stack([dense_row(adapters, o, row, slot) for o, row, slot in rows])
    assert_close("out", expected.to(dtype), adapters.expected(out, x, plan), dtype_eps(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_add_lora_embedding(make_adapters, assert_close, dtype):
    adapters = make_adapters(dtype)
    plan = adapters.plan(*ROWS)
    token_ids = torch.arange(plan.num_tokens) * 7 % adapters.vocab
    out = torch.zeros(plan.num_tokens, adapters.group.out_features[0], dtype=dtype)
    expected = out.double()
    for t, slot in enumerate(plan.token_slots.tolist()):
        if (slot, 0) in adapters.dense:
            a, b, scale = adapters.dense[slot, 0]
            expected[t] += scale * (a[token_ids[t]].double() @ b.double())
    reference.add_lora_embedding(out, token_ids, adapters.table.arena, adapters.table, plan, 0)
    assert_close("out", expected.to(dtype), out, dtype_eps(dtype))


def test_cases_cover_absent_targets_and_every_rank(make_adapters):
    """The other tests rest on this: what they sweep over is really there."""
    adapters = make_adapters(torch.float32)
    used = {slot for slot in ROWS[0] if slot != BASE_SLOT}
    targets = {0, *adapters.group.targets}
    absent = {(slot, target) for slot in used for target in targets} - set(adapters.dense)
    assert absent
    assert {int(adapters.table.b_ranks[slot].max()) for slot in used} == {1, 3, 8, 16, 33, 64}


def dtype_eps(dtype):
    """Both sides round once: they may differ by one rounding where fp32 sums end differently."""
    return torch.finfo(dtype).eps
