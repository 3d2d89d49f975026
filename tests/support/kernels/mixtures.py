"""Adapters of mixtures of experts, in an arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora import LoraGroup, LoraPlan, LoraTable, TableEntry, reference
from tests.support.kernels.packing import Packing
from tests.support.kernels.parts import rank_part

IN, OUT = 70, (40, 33)
EXPERTS, SLOTS = 3, 3
GROUP = LoraGroup((1, 2), IN, (0, OUT[0]), OUT)
MAX_RANK = 33
Ranks = Sequence[Sequence[int]]
"""Of each slot, of each expert; 0: the adapter lacks it."""
MIXED: Ranks = ((3, 0, 33), (0, 0, 0), (8, 8, 1))


@dataclass
class Mixture:
    """`dense[slot, target, expert]` is (A, B, scale) as first made. Target 0 is no mixture."""

    table: LoraTable
    dense: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, float]]

    def plan(self, rows: Sequence[tuple[int, int, int]]) -> LoraPlan:
        slots, experts, lengths = zip(*rows, strict=True)
        return LoraPlan.build(slots, lengths, self.table, "cpu", experts)

    def inputs(self, plan: LoraPlan) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(plan.num_tokens, IN, generator=generator)
        out = torch.randn(plan.num_tokens, GROUP.out_end, generator=generator)
        dtype = self.table.arena.dtype
        return x.to(dtype), out.to(dtype)

    def expected(self, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
        out = out.clone()
        reference.add_lora_experts(out, x, self.table.arena, self.table, plan, GROUP)
        return out


def mixture(
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    shares_a: bool = False,
    part: int = 0,
    num_parts: int = 1,
    is_float8: bool = False,
) -> Mixture:
    """Adapters of these ranks; `shares_a`: experts of one rank share an A, which lies there once.
    Of A there is a part of the ranks."""
    generator = torch.Generator().manual_seed(0)
    packing, dense = Packing(dtype), {}
    factor = 0.75 * 2.0**-12 if is_float8 else 0.75
    rows: list[list[TableEntry]] = []
    for slot, of_slot in enumerate(ranks):
        entries = []
        for target, width in zip(GROUP.targets, OUT, strict=True):
            known: dict[int, torch.Tensor] = {}
            pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
            for expert, rank in enumerate(of_slot):
                a = (torch.randn(rank, IN, generator=generator) * IN**-0.5).to(dtype)
                b = (torch.randn(rank, width, generator=generator)).to(dtype)
                if is_float8:  # one scale is of all experts
                    a, b = (each.float().mul(64).to(torch.float8_e4m3fn) for each in (a, b))
                if shares_a:
                    a = known.setdefault(rank, a)
                pairs.append((a, b) if rank else None)
                if rank:
                    dense[slot, target, expert] = (a, b, factor * (1 + expert))
            cut: dict[int, torch.Tensor] = {}
            for a, _ in filter(None, pairs):
                cut.setdefault(id(a), a[rank_part(len(a), part, num_parts)])
            of_a = [None if pair is None else cut[id(pair[0])] for pair in pairs]
            of_a = [a if a is not None and len(a) else None for a in of_a]
            of_b = [None if pair is None else pair[1] for pair in pairs]
            scales = [1.0 + expert for expert in range(len(pairs))]
            entry = TableEntry(
                *(target, packing.place_experts(of_a, [1.0] * len(pairs))),
                *(packing.place_experts(of_b, scales), max(of_slot), IN, width, factor),
                a_rank=max((len(a) for a in of_a if a is not None), default=0),
                num_experts=len(pairs),
            )
            entries.append(entry)
        rows.append(entries[: 1 + slot % 2])  # adapters that lack a target, too
    table = LoraTable.create(
        len(ranks),
        1 + len(OUT),
        packing.arena(),
        "cpu",
        MAX_RANK,
        rank_parts=num_parts,
        lora_dtype=torch.float8_e4m3fn if is_float8 else dtype,
    )
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
        for target in set(GROUP.targets) - table.adapters[slot].target_set:
            dense = {key: value for key, value in dense.items() if key[:2] != (slot, target)}
    return Mixture(table, dense)


RATIOS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
