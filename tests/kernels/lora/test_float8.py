"""A and B in float8: every implementation against the definition, and this against the matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from kernels.lora import BASE_SLOT, LoraGroup, LoraPlan, LoraTable, TableEntry, cpu, reference
from kernels.lora import native as native_ops
from kernels.lora.plan import TILE_TOKENS
from kernels.lora.table import MixPart
from kernels.lora.views import Float8Weights
from tests.support.kernels.adapters import (
    EMBEDDING,
    RATIOS,
    Adapters,
    build_adapters,
    without_views,
)
from tests.support.kernels.mixtures import GROUP, MIXED, mixture
from tests.support.kernels.packing import Packing

E4M3 = torch.float8_e4m3fn
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
SLOTS = [BASE_SLOT, 0, 1, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 4, 4, BASE_SLOT]
LENGTHS = [2, 3, 1, TILE_TOKENS + 3, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1]
PAIRS = [(0, 0, 3), (0, 2, 2), (2, 1, TILE_TOKENS + 1), (2, 2, 1), (BASE_SLOT, 0, 2), (0, 1, 1)]
CODES = torch.arange(256, dtype=torch.uint8)
CODES[[0x7F, 0xFF]] = 0
"""Every value but NaN."""

Add: TypeAlias = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def float8():
    """`float8(dtype)`: adapters of a model of this dtype."""
    made: dict[torch.dtype, Adapters] = {}

    def make(dtype: torch.dtype) -> Adapters:
        if dtype not in made:
            made[dtype] = build_adapters(dtype, 70, (96, 33, 40), 50, is_float8=True)
        return made[dtype]

    return make


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_the_definition_multiplies_by_the_matrices(float8, assert_close, dtype):
    adapters = float8(dtype)
    plan = adapters.plan(SLOTS, LENGTHS)
    x, out = adapters.inputs(plan)
    expected = out.float().clone()
    for start, end, slot, _ in plan.segments:
        for k, target in enumerate(adapters.group.targets):
            if (slot, target) in adapters.dense:
                a, b, scale = adapters.dense[slot, target]
                first = adapters.group.out_offsets[k]
                product = x[start:end].float() @ a.float().t() @ b.float()
                expected[start:end, first : first + b.shape[1]] += scale * product
    got = adapters.expected(out, x, plan)
    assert_close("out", expected.to(dtype), got, RATIOS[dtype])


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_torch(float8, assert_close, dtype):
    adapters = float8(dtype)
    plan = adapters.plan(SLOTS, LENGTHS)
    x, out = adapters.inputs(plan)
    expected = adapters.expected(out, x, plan)
    cpu.add_lora(out, x, adapters.table, plan, adapters.group)
    assert_close("out", expected, out, RATIOS[dtype])
    assert isinstance(adapters.table.weights(1)[1], Float8Weights), "no converted copies are kept"


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_native(float8, library, assert_close, dtype):
    adapters = float8(dtype)
    plan = adapters.plan(SLOTS, LENGTHS)
    x, out = adapters.inputs(plan)
    expected = adapters.expected(out, x, plan)
    native_ops.add_lora(library, out, x, adapters.table, plan, adapters.group)
    assert_close("out", expected, out, RATIOS[dtype])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_triton(float8, interpreter, assert_close, dtype):
    adapters = float8(dtype)
    plan = adapters.plan(SLOTS, LENGTHS)
    x, out = adapters.inputs(plan)
    got = interpreter.add_lora(adapters, out, x, plan)
    assert_close("out", adapters.expected(out, x, plan), got, RATIOS[dtype])


def token_ids(plan: LoraPlan) -> torch.Tensor:
    return torch.arange(plan.num_tokens) % 50


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_embedding(float8, library, interpreter, assert_close, dtype):
    adapters = float8(dtype)
    plan = adapters.plan(SLOTS, LENGTHS)
    ids, (_, out) = token_ids(plan), adapters.inputs(plan)
    out = out[:, :96].contiguous()
    expected, of_torch, of_native = out.clone(), out.clone(), out.clone()
    table = adapters.table
    reference.add_lora_embedding(expected, ids, table.arena, table, plan, EMBEDDING)
    cpu.add_lora_embedding(of_torch, ids, table, plan, EMBEDDING)
    native_ops.add_lora_embedding(library, of_native, ids, table, plan, EMBEDDING)
    assert_close("torch", expected, of_torch, RATIOS[dtype])
    assert_close("native", expected, of_native, RATIOS[dtype])
    if dtype == FLOAT32:  # the interpreter cannot multiply bfloat16
        got = interpreter.add_lora_embedding(adapters, out, ids, plan)
        assert_close("triton", expected, got, RATIOS[dtype])


@pytest.mark.parametrize("shares_a", [False, True])
def test_experts(library, interpreter, assert_close, shares_a):
    adapters = mixture(MIXED, FLOAT32, shares_a=shares_a, is_float8=True)
    plan = adapters.plan(PAIRS)
    x, out = adapters.inputs(plan)
    expected, table = adapters.expected(out, x, plan), adapters.table
    assert not torch.equal(expected, out)
    of_torch, of_native = out.clone(), out.clone()
    cpu.add_lora(of_torch, x, table, plan, GROUP)
    native_ops.add_lora_experts(library, of_native, x, table, plan, GROUP)
    got = interpreter.call("add_lora", out, x, without_views(table), plan, GROUP)
    for name, each in (("torch", of_torch), ("native", of_native), ("triton", got)):
        assert_close(name, expected, each, RATIOS[FLOAT32])


def test_sums_multiply_the_scales(library, interpreter, assert_close):
    packing, generator = Packing(FLOAT32), torch.Generator().manual_seed(0)
    entries = []
    for rank, scale in ((3, 0.5), (8, 2.0**-9)):
        a, b = (torch.randn(rank, size, generator=generator).to(E4M3) for size in (24, 40))
        entries.append(TableEntry(0, packing.place(a), packing.place(b), rank, 24, 40, scale))
    table = LoraTable.create(2, 1, packing.arena(), "cpu", 8, num_mixes=1, lora_dtype=E4M3)
    for slot, entry in enumerate(entries):
        table.set_row(slot, [entry])
    table.set_mix(2, [MixPart(0, 0.25), MixPart(1, -3.0)])
    plan, group = LoraPlan.build([2, 1], [5, 1], table, "cpu"), LoraGroup((0,), 24, (0,), (40,))
    x = torch.randn(6, 24, generator=generator)
    out = torch.randn(6, 40, generator=generator)
    expected, of_torch, of_native = out.clone(), out.clone(), out.clone()
    reference.add_lora(expected, x, table.arena, table, plan, group)
    parts = [table.weights(slot)[0] for slot in (0, 1)]
    wanted = out[:5] + sum(
        factor * each.scale * (x[:5] @ each.a_t @ each.b)
        for factor, each in zip((0.25, -3.0), parts, strict=True)
    )
    assert_close("definition", wanted, expected[:5], RATIOS[FLOAT32])
    cpu.add_lora(of_torch, x, table, plan, group)
    native_ops.add_lora(library, of_native, x, table, plan, group)
    got = interpreter.call("add_lora", out, x, without_views(table), plan, group)
    for name, each in (("torch", of_torch), ("native", of_native), ("triton", got)):
        assert_close(name, expected, each, RATIOS[FLOAT32])


def codes_table(dtype: torch.dtype) -> LoraTable:
    """Slot 0 has all codes as A and ones as B, slot 1 the other way round, slot 2 both as an
    embedding. Nothing is rounded."""
    packing = Packing(dtype)
    codes, ones = CODES.view(16, 16).view(E4M3), torch.eye(16).to(E4M3)
    table_codes, unit = packing.place(codes), packing.place(ones)
    table = LoraTable.create(3, 2, packing.arena(), "cpu", 16, lora_dtype=E4M3)
    table.set_row(0, [TableEntry(1, table_codes, unit, 16, 16, 16)])
    table.set_row(1, [TableEntry(1, unit, table_codes, 16, 16, 16)])
    table.set_row(2, [TableEntry(0, table_codes, unit, 16, 16, 16, is_embedding=True)])
    return table


def codes_of(add: Add, add_embedding: Add, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns all codes as values, as A, B and an embedding's A have been read."""
    table, group = codes_table(dtype), LoraGroup((1,), 16, (0,), (16,))
    found = []
    for slot in (0, 1):
        plan = LoraPlan.build([slot], [16], table, "cpu")
        found.append(
            add(torch.zeros(16, 16, dtype=dtype), torch.eye(16).to(dtype), table, plan, group)
        )
    plan = LoraPlan.build([2], [16], table, "cpu")
    found.append(add_embedding(torch.zeros(16, 16, dtype=dtype), torch.arange(16), table, plan, 0))
    return [found[0].t(), found[1], found[2]]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_native_reads_every_value_exactly(library, dtype):
    def add(out, *args):
        native_ops.add_lora(library, out, *args)
        return out

    def add_embedding(out, *args):
        native_ops.add_lora_embedding(library, out, *args)
        return out

    for found in codes_of(add, add_embedding, dtype):
        assert torch.equal(found, CODES.view(16, 16).view(E4M3).to(dtype))


def test_triton_reads_every_value_exactly(interpreter):
    def add(*args):
        return interpreter.call("add_lora", *args)

    def add_embedding(*args):
        return interpreter.call("add_lora_embedding", *args)

    for found in codes_of(add, add_embedding, FLOAT32):
        assert torch.equal(found, CODES.view(16, 16).view(E4M3).float())


def test_float8_takes_half_of_the_arena():
    arena = torch.zeros(2 * 256 // 2, dtype=BFLOAT16)
    entry = TableEntry(0, 0, 1, 16, 16, 16)
    with pytest.raises(AssertionError, match="leaves the arena"):
        LoraTable.create(1, 1, arena, "cpu", 16).set_row(0, [entry])
    LoraTable.create(1, 1, arena, "cpu", 16, lora_dtype=E4M3).set_row(0, [entry])
