"""Magnitudes, biases and biases in the base's place: every implementation against the formula, and
beside adapters without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels import lora
from kernels.lora import (
    BASE_SLOT,
    LoraGroup,
    LoraPlan,
    LoraTable,
    OutputVectors,
    TableEntry,
    add_lora,
    native,
    reference,
)
from kernels.lora.rows import ABSENT
from tests.support.kernels.adapters import RATIOS, without_views
from tests.support.kernels.packing import Packing

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
IN, WIDTHS, VOCAB = 70, (96, 33, 40), 50
KINDS = [
    {},
    {"magnitude"},
    {"bias"},
    {"base_bias"},
    {"magnitude", "base_bias"},
    {"bias", "base_bias"},
    {"base_bias", "no LoRA"},
]
"""What the adapter of each slot has, beside A and B, of the targets that it changes."""
SLOTS = [BASE_SLOT, 0, 1, 1, 2, 3, 4, 5, 6, BASE_SLOT, 6]
LENGTHS = [5, 7, 1, 67, 1, 2, 1, 3, 1, 1, 70]


@dataclass
class Case:
    """`dense[slot, target]` is (A, B, scale, vectors by name), apart from the arena."""

    table: LoraTable
    group: LoraGroup
    base_bias: torch.Tensor
    dense: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float, dict[str, Any]]]

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, out = torch.randn(num_tokens, IN), torch.randn(num_tokens, sum(WIDTHS))
        return x.to(self.base_bias.dtype), out.to(self.base_bias.dtype)


def build(dtype: torch.dtype) -> Case:
    """Target 0 is an embedding, the others a group; each slot lacks one of these."""
    torch.manual_seed(0)
    packing, rows, dense = Packing(dtype), [], {}
    for slot, kinds in enumerate(KINDS):
        entries = []
        for target, width in enumerate((WIDTHS[0], *WIDTHS)):
            is_embedding = target == 0
            if (slot + target) % 5 == 4 or (is_embedding and "base_bias" in kinds):
                continue
            rank, num_in = 0 if "no LoRA" in kinds else 3 + 5 * slot, VOCAB if is_embedding else IN
            shape = (num_in, rank) if is_embedding else (rank, num_in)
            a, b = (torch.randn(size).to(dtype) * 0.3 for size in (shape, (rank, width)))
            values = {
                kind: torch.rand(width) + 0.5 for kind in kinds if kind in OutputVectors._fields
            }
            if "base_bias" in values:
                values["base_bias"] = values["base_bias"].to(dtype)
            granules = {kind: packing.place_as_it_is(each) for kind, each in values.items()}
            entries.append(
                TableEntry(
                    *(target, packing.place(a), packing.place(b), rank, num_in, width, 0.75),
                    is_embedding=is_embedding,
                    vectors=OutputVectors(**granules),
                )
            )
            dense[slot, target] = (a, b, 0.75, values)
        rows.append(entries)
    table = LoraTable.create(len(KINDS), 4, packing.arena(), "cpu", max_rank=64)
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
    offsets = tuple(sum(WIDTHS[:k]) for k in range(len(WIDTHS)))
    group = LoraGroup((1, 2, 3), IN, offsets, WIDTHS)
    return Case(table, group, torch.randn(sum(WIDTHS)).to(dtype), dense)


def formula(case: Case, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan, base_bias):
    """The definition in other words: of each token and target at once, from what was placed."""
    out, wide = out.clone(), out.float()
    for t, slot in enumerate(plan.token_slots.tolist()):
        columns = zip(case.group.targets, case.group.out_offsets, WIDTHS, strict=True)
        for target, o, n in columns:
            if (slot, target) not in case.dense:
                continue
            a, b, scale, vectors = case.dense[slot, target]
            old = torch.zeros(n) if base_bias is None else base_bias[o : o + n].float()
            product = wide[t, o : o + n] - old + scale * (x[t].float() @ a.float().T @ b.float())
            product *= vectors.get("magnitude", 1.0)
            total = product + vectors.get("base_bias", old).float()
            total += scale * vectors.get("bias", 0.0)
            out[t, o : o + n] = total.to(out.dtype)
    return out


@pytest.fixture(params=DTYPES, ids=str)
def case(request) -> Case:
    return build(request.param)


@pytest.mark.parametrize("has_base_bias", [False, True])
@pytest.mark.parametrize("path", ["reference", "torch", "native"])
def test_outputs(library, assert_close, case, path, has_base_bias):
    plan = LoraPlan.build(SLOTS, LENGTHS, case.table, "cpu")
    assert plan.has_vectors
    x, out = case.inputs(plan.num_tokens)
    base_bias = case.base_bias if has_base_bias else None
    expected = formula(case, out, x, plan, base_bias)
    got = out.clone()
    if path == "native":
        native.add_lora(library, got, x, case.table, plan, case.group, base_bias)
    else:
        compute = reference.add_lora if path == "reference" else add_lora
        compute(got, x, case.table.arena, case.table, plan, case.group, base_bias)
    assert_close("out", expected, got, RATIOS[out.dtype])
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * len(SLOTS)], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton(interpreter, assert_close, dtype, lengths):
    case = build(dtype)
    plan = LoraPlan.build(SLOTS, lengths, case.table, "cpu")
    x, out = case.inputs(plan.num_tokens)
    table = without_views(case.table)
    args = (out, x, table, plan, case.group, case.base_bias)
    got = interpreter.call("add_lora_vectors", *args)
    expected = formula(case, out, x, plan, case.base_bias)
    assert_close("out", expected, got, RATIOS[dtype])
    base = plan.token_slots == BASE_SLOT
    assert torch.equal(got[base], out[base]), "base rows stay bitwise"


@pytest.mark.parametrize("path", ["reference", "torch", "native", "triton"])
def test_magnitude_of_an_embedding(library, interpreter, assert_close, path):
    case = build(torch.float32)
    table = case.table
    plan = LoraPlan.build([BASE_SLOT, 0, 1, 1], [2, 3, 1, 9], table, "cpu")
    ids = torch.arange(plan.num_tokens) * 7 % VOCAB
    out = torch.randn(plan.num_tokens, WIDTHS[0])
    expected = out.clone()
    for t, slot in enumerate(plan.token_slots.tolist()):
        if slot != BASE_SLOT:
            a, b, scale, vectors = case.dense[slot, 0]
            expected[t] = (out[t] + scale * a[ids[t]] @ b) * vectors.get("magnitude", 1.0)
    got = out.clone()
    if path == "triton":
        got = interpreter.call("add_lora_embedding", out, ids, without_views(table), plan, 0)
    elif path == "native":
        native.add_lora_embedding(library, got, ids, table, plan, 0)
    else:
        module = reference if path == "reference" else lora
        module.add_lora_embedding(got, ids, table.arena, table, plan, 0)
    assert_close("out", expected, got, RATIOS[out.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_adapter_without_vectors_has_the_same_bits_beside_some(library, dtype):
    case = build(dtype)
    mixed = LoraPlan.build(SLOTS, LENGTHS, case.table, "cpu")
    plain = LoraPlan.build([BASE_SLOT if s else s for s in SLOTS], LENGTHS, case.table, "cpu")
    assert not plain.has_vectors
    x, out = case.inputs(mixed.num_tokens)
    got = {}
    for name, plan in (("mixed", mixed), ("plain", plain)):
        got[name] = out.clone()
        native.add_lora(library, got[name], x, case.table, plan, case.group, case.base_bias)
    rows = mixed.token_slots == 0
    assert torch.equal(got["mixed"][rows], got["plain"][rows])


def test_a_cleared_row_has_no_vectors() -> None:
    case = build(torch.float32)
    case.table.clear_row(1)
    assert not case.table.rows[1].any()
    plan = LoraPlan.build([1], [3], case.table, "cpu")
    assert not plan.has_vectors


def test_vectors_must_lie_in_the_arena() -> None:
    case = build(torch.float32)
    last = case.table.arena.numel() * 4 // 256
    for vectors in (OutputVectors(magnitude=last), OutputVectors(ABSENT, -2)):
        with pytest.raises(AssertionError):
            case.table.set_row(0, [TableEntry(1, 3, 3, 1, IN, 96, vectors=vectors)])
