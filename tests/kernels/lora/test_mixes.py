"""Sums of several adapters: every implementation against the formula, next to single adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.lora import (
    BASE_SLOT,
    LoraGroup,
    LoraPlan,
    LoraTable,
    TableEntry,
    add_lora,
    add_lora_embedding,
    native,
    reference,
)
from kernels.lora.table import MAX_PARTS, MixPart
from tests.kernels.lora.packing import Packing

IN, WIDTHS, VOCAB = 70, (96, 33, 40), 50
RANKS = (1, 3, 8, 16, 33)
MIXES = (
    ((0, 1.0),),
    ((1, 0.5), (3, -2.0)),
    ((4, 1.0), (2, 0.0), (0, 3.0)),
    tuple((slot % 5, 0.25 * (slot + 1)) for slot in range(MAX_PARTS)),
)
MAX_LORAS = len(RANKS)
SLOTS = [BASE_SLOT, 0, *(MAX_LORAS + MAX_PARTS * mix for mix in (0, 1, 1, 2, 3, 3)), 4, BASE_SLOT]
LENGTHS = [3, 5, 7, 1, 68, 2, 1, 9, 66, 1]
Dense = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


def build(dtype: torch.dtype) -> tuple[LoraTable, LoraGroup, Dense]:
    """Target 0 is an embedding, the others a group; each adapter lacks one of these."""
    torch.manual_seed(0)
    packing, rows, dense = Packing(dtype), [], {}
    for slot, rank in enumerate(RANKS):
        entries = []
        for target, width in enumerate((WIDTHS[0], *WIDTHS)):
            if (slot + target) % 4 == 3:
                continue
            is_embedding, num_in = target == 0, IN if target else VOCAB
            shape = (num_in, rank) if is_embedding else (rank, num_in)
            a, b = (torch.randn(size).to(dtype) * 0.3 for size in (shape, (rank, width)))
            places = packing.place(a), packing.place(b)
            entries.append(
                TableEntry(*(target, *places, rank, num_in, width, 0.75), is_embedding=is_embedding)
            )
            dense[slot, target] = (a, b)
        rows.append(entries)
    table = LoraTable.create(
        MAX_LORAS, 4, packing.arena(), "cpu", max_rank=64, num_mixes=len(MIXES)
    )
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
    for mix, parts in enumerate(MIXES):
        table.set_mix(MAX_LORAS + MAX_PARTS * mix, [MixPart(*part) for part in parts])
    offsets = tuple(sum(WIDTHS[:k]) for k in range(len(WIDTHS)))
    return table, LoraGroup((1, 2, 3), IN, offsets, WIDTHS), dense


def parts_of(slot: int) -> tuple[tuple[int, float], ...]:
    if slot == BASE_SLOT:
        return ()
    return MIXES[(slot - MAX_LORAS) // MAX_PARTS] if slot >= MAX_LORAS else ((slot, 1.0),)


def exact(out: torch.Tensor, x: torch.Tensor, dense: Dense, ids: torch.Tensor | None) -> Any:
    """Returns the sums in fp64; of `ids`, those of the embedding."""
    total, start = out.double(), 0
    for slot, length in zip(SLOTS, LENGTHS, strict=True):
        rows = slice(start, start + length)
        for adapter, scale in parts_of(slot):
            column = 0
            for target, width in enumerate(WIDTHS, 1):
                columns, column = slice(column, column + width), column + width
                if ids is None and (adapter, target) in dense:
                    a, b = (each.double() for each in dense[adapter, target])
                    total[rows, columns] += 0.75 * scale * (x[rows].double() @ a.t()) @ b
            if ids is not None and (adapter, 0) in dense:
                a, b = (each.double() for each in dense[adapter, 0])
                total[rows] += 0.75 * scale * a[ids[rows]] @ b
        start += length
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["reference", "torch", "native"])
def test_sums_are_the_formulas(path: str, dtype: torch.dtype, library: Any) -> None:
    table, group, dense = build(dtype)
    plan = LoraPlan.build(SLOTS, LENGTHS, table, "cpu")
    count = sum(LENGTHS)
    x, out = torch.randn(count, IN).to(dtype), torch.randn(count, sum(WIDTHS)).to(dtype)
    rows, ids = torch.randn(count, WIDTHS[0]).to(dtype), torch.randint(0, VOCAB, (count,))
    wanted = exact(out, x, dense, None), exact(rows, x, dense, ids)
    before = out.clone()
    operands = table.arena, table, plan
    if path == "native":
        native.add_lora(library, out, x, table, plan, group)
        native.add_lora_embedding(library, rows, ids, table, plan, 0)
    else:
        ops = reference if path == "reference" else None
        (ops.add_lora if ops else add_lora)(out, x, *operands, group)
        (ops.add_lora_embedding if ops else add_lora_embedding)(rows, ids, *operands, 0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for got, exactly in zip((out, rows), wanted, strict=True):
        error = (got.double() - exactly).abs().max() / exactly.abs().max()
        assert error < tolerance, error
    assert torch.equal(out[:3], before[:3])
    assert torch.equal(out[-1], before[-1])


@pytest.mark.parametrize("path", ["torch", "native"])
def test_single_adapters_do_not_see_mixes(path: str, library: Any) -> None:
    """Bit for bit what they are in a batch without any."""
    table, group, _ = build(torch.bfloat16)
    torch.manual_seed(1)
    x = torch.randn(sum(LENGTHS), IN).bfloat16()
    outs = []
    for slots in (SLOTS, [slot if slot < MAX_LORAS else BASE_SLOT for slot in SLOTS]):
        plan = LoraPlan.build(slots, LENGTHS, table, "cpu")
        out = torch.ones(len(x), sum(WIDTHS)).bfloat16()
        if path == "native":
            native.add_lora(library, out, x, table, plan, group)
        else:
            add_lora(out, x, table.arena, table, plan, group)
        outs.append(out)
    single = torch.tensor(SLOTS).repeat_interleave(torch.tensor(LENGTHS)) < MAX_LORAS
    assert torch.equal(outs[0][single], outs[1][single])
    assert not torch.equal(outs[0], outs[1])
