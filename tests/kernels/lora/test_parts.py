"""Devices that share A's rank: each shrinks to its part, and expands what all of them made."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import BASE_SLOT, LoraGroup, LoraTable, TableEntry, cpu, native, reference
from kernels.lora.plan import TILE_TOKENS
from tests.support.kernels.parts import join, join_native, join_tensors, part_tables

ROWS = ([BASE_SLOT, 0, 1, 1, 2, 3, 4, 5, BASE_SLOT], [5, 7, 1, TILE_TOKENS + 3, 1, 2, 1, 3, 1])
"""Ranks 1, 3, 8, 16, 33 and 64."""
NATIVE_DTYPES = [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.parametrize("num_parts", [2, pytest.param(4, marks=pytest.mark.long), 8]),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def embedding_case(adapters):
    """The plan, token ids, out, and the group of the table's first target."""
    plan = adapters.plan(*ROWS)
    token_ids = torch.arange(plan.num_tokens) * 7 % adapters.vocab
    width = adapters.group.out_features[0]
    out = torch.randn(plan.num_tokens, width, generator=torch.Generator().manual_seed(2))
    return plan, token_ids, out.to(adapters.dtype), LoraGroup((0,), 0, (0,), (width,))


def test_the_definition(make_adapters, num_parts):
    adapters = make_adapters(torch.float32)
    plan, group = adapters.plan(*ROWS), adapters.group
    x, out = adapters.inputs(plan)
    tables = part_tables(adapters, num_parts)
    assert any(table.a_ranks[0].max() == 0 < table.b_ranks[0].max() for table in tables)
    ys = [reference.shrink(x, table.arena, table, plan, group) for table in tables]
    y = join(ys, tables, plan, group.targets)
    for table in tables:
        got = out.clone()
        reference.expand(got, y, table.arena, table, plan, group)
        torch.testing.assert_close(got, adapters.expected(out, x, plan), rtol=1e-6, atol=1e-6)


def test_the_definition_of_an_embedding(make_adapters, num_parts):
    adapters = make_adapters(torch.float32)
    plan, token_ids, out, group = embedding_case(adapters)
    tables = part_tables(adapters, num_parts)
    ys = [reference.gather(token_ids, table.arena, table, plan, 0) for table in tables]
    y = join(ys, tables, plan, group.targets)
    expected, got = out.clone(), out.clone()
    reference.add_lora_embedding(expected, token_ids, adapters.table.arena, adapters.table, plan, 0)
    reference.expand(got, y, tables[-1].arena, tables[-1], plan, group)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors(make_adapters, assert_close, ratio_of, dtype, num_parts):
    adapters = make_adapters(dtype)
    plan, group = adapters.plan(*ROWS), adapters.group
    x, out = adapters.inputs(plan)
    tables = part_tables(adapters, num_parts)
    shrunk = join_tensors([cpu.shrink(x, table, plan, group) for table in tables])
    got = out.clone()
    cpu.expand(got, shrunk, plan, group)
    assert_close("out", adapters.expected(out, x, plan), got, ratio_of(dtype))
    plan, token_ids, out, group = embedding_case(adapters)
    expected, got = out.clone(), out.clone()
    cpu.add_lora_embedding(expected, token_ids, adapters.table, plan, 0)
    shrunk = join_tensors([cpu.gather(token_ids, table, plan, 0) for table in tables])
    cpu.expand(got, shrunk, plan, group)
    assert torch.equal(got, expected)


def native_devices(tables, plan, num_targets):
    """The native operations of each table, all over plans of these tokens."""
    found = []
    for table in tables:
        native_plan = native.NativeLoraPlan(plan.num_tokens)
        native_plan.fill(plan.token_slots.tolist())
        found.append(native.NativeLora.create(table, native_plan, num_targets))
    return found


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_native(library, make_adapters, dtype, num_parts):
    adapters = make_adapters(dtype)
    plan, group = adapters.plan(*ROWS), adapters.group
    x, out = adapters.inputs(plan)
    expected, got = out.clone(), out.clone()
    native.add_lora(library, expected, x, adapters.table, plan, group)
    devices = native_devices(part_tables(adapters, num_parts), plan, len(group.targets))
    for device in devices:
        library.run(device.shrink_op(group, x))
    (last,) = native_devices([devices[-1].table], plan, len(group.targets))
    join_native(last, devices, group.targets)
    library.run(last.expand_op(group, got))
    assert torch.equal(got, expected), "no part changes a bit of another"


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_native_embedding(library, make_adapters, dtype, num_parts):
    adapters = make_adapters(dtype)
    plan, token_ids, out, group = embedding_case(adapters)
    expected, got = out.clone(), out.clone()
    native.add_lora_embedding(library, expected, token_ids, adapters.table, plan, 0)
    devices = native_devices(part_tables(adapters, num_parts), plan, 1)
    for device in devices:
        library.run(device.gather_op(0, token_ids))
    (last,) = native_devices([devices[-1].table], plan, 1)
    join_native(last, devices, group.targets)
    library.run(last.expand_op(group, got))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str
)
def test_triton(make_adapters, interpreter, dtype, num_parts):
    adapters = make_adapters(dtype)
    plan, group = adapters.plan(*ROWS), adapters.group
    x, out = adapters.inputs(plan)
    tables = part_tables(adapters, num_parts)
    ys = [interpreter.half("shrink", x, table, plan, group) for table in tables]
    y = join(ys, tables, plan, group.targets)
    got = interpreter.half("expand", out, tables[-1], plan, y, group)
    assert torch.equal(got, interpreter.add_lora(adapters, out, x, plan))


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_triton_embedding(make_adapters, interpreter, dtype, num_parts):
    adapters = make_adapters(dtype)
    plan, token_ids, out, group = embedding_case(adapters)
    tables = part_tables(adapters, num_parts)
    ys = [interpreter.half("gather", token_ids, table, plan, 0) for table in tables]
    y = join(ys, tables, plan, group.targets)
    got = interpreter.half("expand", out, tables[-1], plan, y, group)
    assert torch.equal(got, interpreter.add_lora_embedding(adapters, out, token_ids, plan))


def test_whole_and_shared_ranks_are_not_mixed_up(make_adapters, num_parts):
    """What adds both products at once asserts that A is whole, as does the table that promises."""
    arena = torch.zeros(4096)
    entry = TableEntry(0, 0, 1, 16, 8, 8, a_rank=16 // num_parts)
    with pytest.raises(AssertionError, match="of A of target 0"):
        LoraTable.create(1, 1, arena, "cpu").set_row(0, [entry])
    table = LoraTable.create(1, 1, arena, "cpu", rank_parts=num_parts)
    table.set_row(0, [entry])
    too_much = TableEntry(0, 0, 1, 16, 8, 8, a_rank=16 // num_parts + 1)
    with pytest.raises(AssertionError, match="of A of target 0"):
        table.set_row(0, [too_much])
    adapters = make_adapters(torch.float32)
    plan, group = adapters.plan([0]), LoraGroup((0,), 8, (0,), (8,))
    x, out = torch.zeros(1, 8), torch.zeros(1, 8)
    lora = native.NativeLora.create(table, native.NativeLoraPlan(1))
    for add in (
        lambda: reference.add_lora(out, x, arena, table, plan, group),
        lambda: cpu.add_lora(out, x, table, plan, group),
        lambda: lora.add_ops(group, x, out),
    ):
        with pytest.raises(AssertionError, match="parts of the shrunk rows"):
            add()
