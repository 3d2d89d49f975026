"""On a GPU: the kernels against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import lora
from kernels.lora import BASE_SLOT, LoraPlan, LoraTable, TableEntry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXES = [
    [BASE_SLOT] * 16,
    list(range(16)),
    [5] * 16,
    [BASE_SLOT] * 3 + [1, 1, 2, 3, 3, 3, 4],
    [9],
]


def on_gpu(table: LoraTable) -> LoraTable:
    """The same rows over a copy of the arena; the views of the host are not needed there."""
    return replace(table, arena=table.arena.cuda(), rows=table.rows.cuda())


def add_lora(out, x, table, plan, group):
    lora.add_lora(out, x, table.arena, table, plan, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [*((mix, [1] * len(mix)) for mix in MIXES), ([BASE_SLOT, 0, 1, 2, 3], [5, 300, 1, 2, 17])],
)
def test_against_the_definition(make_adapters, assert_close, ratio_of, slots, lengths, dtype):
    adapters = make_adapters(dtype, 1100, (512, 129, 40))
    table = on_gpu(adapters.table)
    plan = LoraPlan.build(slots, lengths, table, "cuda")
    host_plan = adapters.plan(slots, lengths)
    x, out = adapters.inputs(host_plan)
    got = out.cuda()
    add_lora(got, x.cuda(), table, plan, adapters.group)
    assert_close("out", adapters.expected(out, x, host_plan), got.cpu(), ratio_of(dtype))


def test_a_row_is_written_as_on_the_host():
    tables = [LoraTable.create(3, 4, torch.zeros(4096, device=d), d) for d in ("cpu", "cuda")]
    for table in tables:
        table.set_row(1, [TableEntry(2, 3, 9, 4, 100, 50, 0.5)])
        table.set_row(2, [TableEntry(0, 1, 2, 1, 8, 8)])
        table.clear_row(2)
    assert torch.equal(tables[0].rows, tables[1].rows.cpu())
