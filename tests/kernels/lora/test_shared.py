"""Ranks that share adapters by inputs and outputs: each shrinks its part of the inputs, and expands
the sum of all to its part of the outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from kernels.lora import BASE_SLOT, LoraGroup, LoraPlan, LoraTable, TableEntry, add_lora, reference
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.lora.plan import TILE_TOKENS
from kernels.lora.table import MAX_PARTS, MixPart
from kernels.ranks.memory import RankMemory, create_file
from tests.support.inference.ranks import exchanges, on_ranks
from tests.support.kernels.adapters import NUM_SLOTS, Adapters
from tests.support.kernels.packing import Packing
from tests.support.native import native_library

MIXES = (((1, 0.5), (3, -2.0)), ((4, 1.0), (2, 0.25), (0, 3.0)))
SLOTS = [BASE_SLOT, 0, 1, NUM_SLOTS, 2, 3, NUM_SLOTS + MAX_PARTS, 4, 5, BASE_SLOT, NUM_SLOTS]
LENGTHS = [5, 7, 1, 3, TILE_TOKENS + 3, 1, 2, 1, 3, 1, 1]


def part_of(size: int, index: int, count: int) -> slice:
    return slice(index * size // count, (index + 1) * size // count)


def table_of(adapters: Adapters, index: int, count: int) -> tuple[LoraTable, LoraGroup]:
    """A rank's part of the adapters' group, with mixes."""
    packing, group = Packing(adapters.dtype), adapters.group
    inputs = part_of(group.in_features, index, count)
    outputs = [part_of(width, index, count) for width in group.out_features]
    num_in, rows = inputs.stop - inputs.start, []
    for slot in range(NUM_SLOTS):
        entries = []
        for k, target in enumerate(group.targets):
            if (slot, target) in adapters.dense:
                a, b, scale = adapters.dense[slot, target]
                a, b = a[:, inputs].contiguous(), b[:, outputs[k]].contiguous()
                places = packing.place(a), packing.place(b), len(b)
                entries.append(TableEntry(target, *places, num_in, b.shape[1], scale))
        rows.append(entries)
    whole, arena = adapters.table, packing.arena()
    table = LoraTable.create(
        *(NUM_SLOTS, whole.num_targets, arena, "cpu", whole.max_rank), num_mixes=len(MIXES)
    )
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
    for place, parts in enumerate(MIXES):
        table.set_mix(NUM_SLOTS + place * MAX_PARTS, [MixPart(*part) for part in parts])
    starts = zip(group.out_offsets, outputs, strict=True)
    offsets = tuple(offset + part.start for offset, part in starts)
    widths = tuple(part.stop - part.start for part in outputs)
    return table, LoraGroup(group.targets, num_in, offsets, widths)


AddLora = Callable[[int, torch.Tensor, torch.Tensor, LoraTable, LoraPlan, LoraGroup], None]
"""Adds the LoRA of the rank with this index: out, x, its table, plan and group."""


@contextmanager
def in_torch(count: int) -> Iterator[AddLora]:
    all_exchanges = exchanges(count)
    yield lambda index, out, x, table, plan, group: add_lora(
        out, x, table.arena, table, plan, group, None, all_exchanges[index].sum
    )


@contextmanager
def in_native_kernels(count: int) -> Iterator[AddLora]:
    library, num_threads = native_library(), torch.get_num_threads()
    file = create_file([count], num_threads)

    def add(
        index: int,
        out: torch.Tensor,
        x: torch.Tensor,
        table: LoraTable,
        plan: LoraPlan,
        group: LoraGroup,
    ) -> None:
        own = NativeLoraPlan(plan.num_tokens, table=table)
        own.fill(plan.token_slots.tolist())
        lora = NativeLora.create(table, own, len(group.targets))
        memory = RankMemory(file, [count], 0, index, num_threads, 60.0)
        sum_ranks = partial(lora.sum_op, ranks=memory)
        library.run(*lora.add_ops(group, x, out, None, sum_ranks))
        assert memory.fault is None

    try:
        yield add
    finally:
        os.close(file)


@pytest.mark.parametrize("start", [in_torch, in_native_kernels])
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_all_ranks_are_the_whole(
    make_adapters: Callable[..., Adapters],
    assert_close: Any,
    ratio_of: Any,
    dtype: torch.dtype,
    count: int,
    start: Callable[[int], AbstractContextManager[AddLora]],
) -> None:
    """Rows of one token and longer ones, sums of adapters, and adapters that lack a target."""
    adapters = make_adapters(dtype)
    table, group = table_of(adapters, 0, 1)
    plan = LoraPlan.build(SLOTS, LENGTHS, table, "cpu")
    x, out = adapters.inputs(plan)
    expected = out.clone()
    reference.add_lora(expected, x, table.arena, table, plan, group)
    with start(count) as add:

        def run(index: int) -> torch.Tensor:
            own, own_group = table_of(adapters, index, count)
            own_plan = LoraPlan.build(SLOTS, LENGTHS, own, "cpu")
            found = out.clone() if index == 0 else torch.zeros_like(out)
            part = x[:, part_of(x.shape[1], index, count)]
            add(index, found, part, own, own_plan, own_group)
            return found

        terms = on_ranks(count, run)
    found = torch.stack([each.float() for each in terms]).sum(dim=0).to(dtype)
    assert_close("out", expected, found, ratio_of(dtype))
