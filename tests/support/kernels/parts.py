"""Devices that share A's rank, on one: a table of each, and the shrunk rows of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.lora import LoraPlan, LoraTable, TableEntry
from kernels.lora.cpu import Shrunk
from kernels.lora.native import NativeLora
from kernels.lora.rows import NO_EXPERT
from kernels.lora.views import Place
from tests.support.kernels.packing import Packing


def rank_part(rank: int, part: int, parts: int) -> slice:
    """Part i of n is rounded up; the last ones may be smaller, or empty."""
    size = math.ceil(rank / parts)
    return slice(min(rank, part * size), min(rank, (part + 1) * size))


def part_tables(adapters, parts: int) -> list[LoraTable]:
    """Tables over arenas of their own, with a part of each A and every B."""
    return [_part_table(adapters, part, parts) for part in range(parts)]


def _part_table(adapters, part: int, parts: int) -> LoraTable:
    packing, rows = Packing(adapters.dtype), []
    for slot, row in enumerate(adapters.table.adapters):
        for index, target in enumerate(row.targets.tolist()):
            a, b, scale = adapters.dense[slot, target]
            is_embedding = bool(row.is_embedding[index])
            ranks = rank_part(len(b), part, parts)
            a = a[:, ranks] if is_embedding else a[ranks]
            places = packing.place(a), packing.place(b), len(b)
            features = int(row.in_features[index]), b.shape[1]
            a_rank = ranks.stop - ranks.start
            entry = TableEntry(target, *places, *features, scale, is_embedding, a_rank)
            rows.append((slot, entry))
    whole = adapters.table
    table = LoraTable.create(
        *(whole.max_loras, whole.num_targets, packing.arena(), "cpu", whole.max_rank),
        rank_parts=parts,
    )
    for slot in range(whole.max_loras):
        table.set_row(slot, [entry for other, entry in rows if other == slot])
    return table


def ranks_of(
    tables: Sequence[LoraTable], slot: int, expert: int, target: int
) -> tuple[list[int], int]:
    """Returns the ranks of A of each device, and that of B."""
    found = []
    for table in tables:
        place = Place(int(table.a_granules[slot, target]), int(table.a_ranks[slot, target]))
        found.append(place if expert == NO_EXPERT else place.of_expert(table.arena, expert))
    b = Place(int(tables[0].b_granules[slot, target]), int(tables[0].b_ranks[slot, target]))
    b = b if expert == NO_EXPERT else b.of_expert(tables[0].arena, expert)
    return [place.rank for place in found], b.rank


def join(
    ys: Sequence[torch.Tensor], tables: Sequence[LoraTable], plan: LoraPlan, targets: Sequence[int]
) -> torch.Tensor:
    """Returns y of all devices, `[..., T, K, ranks]`, as of one that has the whole of A."""
    whole = torch.zeros_like(ys[0])
    for start, end, slot, expert in plan.segments:
        for k, target in enumerate(targets):
            parts, rank = ranks_of(tables, slot, expert, target)
            assert sum(parts) == rank
            rows = [y[..., start:end, k, :part] for y, part in zip(ys, parts, strict=True)]
            whole[..., start:end, k, :rank] = torch.cat(rows, -1)
    return whole


def join_tensors(shrunk: Sequence[Shrunk]) -> Shrunk:
    """As `join`, of the path that runs on tensors."""
    return Shrunk(*(list(map(_joined, *lists)) for lists in zip(*shrunk, strict=True)))


def _joined(*products):
    tokens, k, weights, _ = products[0]
    return tokens, k, weights, torch.cat([y for *_, y in products], -1)


def join_native(whole: NativeLora, devices: Sequence[NativeLora], targets: Sequence[int]) -> None:
    """As `join`, in the workspaces of native operations."""
    tables = [device.table for device in devices]
    for first, count, slot, expert, _ in whole.plan.items.tolist():
        expert = expert if whole.plan.has_experts else NO_EXPERT
        for k, target in enumerate(targets):
            parts, rank = ranks_of(tables, slot, expert, target)
            views = [
                _rows(device, k, first, count, part)
                for device, part in zip(devices, parts, strict=True)
            ]
            rows = _rows(whole, k, first, count, rank)
            rows[:, :rank] = torch.cat([v[:, :n] for v, n in zip(views, parts, strict=True)], 1)
            rows[:, rank:] = 0


def _rows(lora: NativeLora, k: int, first: int, count: int, rank: int) -> torch.Tensor:
    """See `native/src/lora.h`."""
    even = rank + rank % 2
    start = (k * lora.plan.max_tokens + first) * (lora.table.max_rank + lora.table.max_rank % 2)
    return lora.shrunk[start : start + count * even].view(count, even)
