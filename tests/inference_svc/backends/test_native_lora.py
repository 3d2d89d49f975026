"""Which groups of projections the native path computes for a step's adapters."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.native.adapter_ops import ADDED_TOKENS
from inference_svc.backends.native.lora import MAX_KNOWN, NativeLoraOps
from inference_svc.core import BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.operations import Rows
from kernels.lora import LoraGroup
from kernels.lora.plan import LoraContents
from kernels.lora.rows import TableEntry
from kernels.lora.table import LoraTable

NUM_GROUPS = 40


def row(slot: int) -> BatchRow:
    sequence = Sequence(Request("r", (1, 2), SamplingParams()))
    sequence.slot = slot
    return BatchRow(sequence, 1, 1, True)


def test_few_sets_of_groups_are_distinguished() -> None:
    """Tenants choose what their adapters change, and every set is a program."""
    table = LoraTable.create(NUM_GROUPS, NUM_GROUPS, torch.zeros(1024), "cpu", max_rank=1)
    groups = {f"group {i}": LoraGroup((i,), 8, (0,), (8,)) for i in range(NUM_GROUPS)}
    for slot in range(NUM_GROUPS):
        table.set_row(slot, [TableEntry(slot, 0, 1, 1, 8, 8)])
    targets = AppliedTargets(groups, {}, vocab_size=8, max_added_tokens=0)
    ops = NativeLoraOps(SimpleNamespace(table=table), targets, max_tokens=4, max_outputs=4)
    assert ops.groups_of(LoraContents.of(table, [])) == frozenset()
    for _ in range(2):
        assert ops.plan([row(-1)]) == frozenset()
        for slot in range(MAX_KNOWN):
            assert (
                ops.groups_of(LoraContents.of(table, [slot]))
                == ops.plan([row(slot)])
                == {f"group {slot}"}
            )
        for slot in range(MAX_KNOWN, NUM_GROUPS):
            assert (
                ops.groups_of(LoraContents.of(table, [slot]))
                == ops.plan([row(slot)])
                == {*groups, ADDED_TOKENS}
            )


def test_targets_of_no_group_are_not_computed() -> None:
    """No adapter that the server accepts has them."""
    table = LoraTable.create(2, 3, torch.zeros(1024), "cpu", max_rank=1)
    table.set_row(0, [TableEntry(1, 0, 1, 1, 8, 8), TableEntry(2, 0, 1, 1, 8, 8)])
    groups = {"o": LoraGroup((1,), 8, (0,), (8,))}
    targets = AppliedTargets(groups, {}, vocab_size=8, max_added_tokens=0)
    ops = NativeLoraOps(SimpleNamespace(table=table), targets, max_tokens=4, max_outputs=4)
    assert ops.groups_of(LoraContents.of(table, [0])) == ops.plan([row(0)]) == {"o"}
    x, out = torch.zeros(4, 8), torch.zeros(4, 8)
    assert list(ops.add("o", x, out, None, Rows.TOKENS))
    assert not list(ops.add("down", x, out, None, Rows.TOKENS))
    assert ops.add_embedding(torch.zeros(4, dtype=torch.int64), out) == []
