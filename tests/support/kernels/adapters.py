"""Adapters in an arena, and the Triton operations over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.lora import LoraGroup, LoraPlan, LoraTable, TableEntry, reference
from tests.support.kernels.packing import Packing, to_float8

RANKS = (1, 3, 8, 16, 33, 64)
NUM_SLOTS = 36
EMBEDDING = 0
"""Target 0 of the table is an embedding; 1, 2, ... are the group's."""

RATIOS = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
"""Relative RMS a fast path may differ by: it rounds the shrunk rows, and the sum, to the dtype."""


@dataclass
class Adapters:
    """NUM_SLOTS adapters of cycling ranks in one arena; each fourth (slot, target) is absent.

    `dense[slot, target]` is (A, B, scale) as first made, apart from the arena.
    """

    group: LoraGroup
    table: LoraTable
    vocab: int
    dense: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]]

    @property
    def dtype(self) -> torch.dtype:
        return self.table.arena.dtype

    def plan(self, slots: Sequence[int], lengths: Sequence[int] | None = None) -> LoraPlan:
        lengths = [1] * len(slots) if lengths is None else lengths
        return LoraPlan.build(slots, lengths, self.table, "cpu")

    def inputs(self, plan: LoraPlan, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, in] and out [T, sum of out]; a token's values depend on its index alone."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(plan.num_tokens, self.group.in_features, generator=generator)
        out = torch.randn(plan.num_tokens, self.group.out_end, generator=generator)
        return x.to(self.dtype), out.to(self.dtype)

    def expected(self, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
        out = out.clone()
        reference.add_lora(out, x, self.table.arena, self.table, plan, self.group)
        return out


def build_adapters(
    dtype: torch.dtype,
    in_features: int,
    out_features: Sequence[int],
    vocab: int,
    *,
    is_float8: bool = False,
) -> Adapters:
    generator = torch.Generator().manual_seed(0)
    packing = Packing(dtype)
    place = packing.place
    rows: list[list[TableEntry]] = []
    dense = {}

    for slot in range(NUM_SLOTS):
        entries = []
        rank = RANKS[slot % len(RANKS)]
        for target, width in enumerate((out_features[0], *out_features)):
            if (slot + target) % 4 == 3:
                continue
            is_embedding = target == EMBEDDING
            num_in = vocab if is_embedding else in_features
            shape = (num_in, rank) if is_embedding else (rank, num_in)
            spread = 1.0 if is_embedding else num_in**-0.5
            a = (torch.randn(shape, generator=generator) * spread).to(dtype)
            b = (torch.randn(rank, width, generator=generator) * rank**-0.5).to(dtype)
            scale = 1.0 if slot % 2 else 0.75
            if is_float8:
                a, a_scale = to_float8(a)
                b, b_scale = to_float8(b)
                scale *= a_scale * b_scale
            dense[slot, target] = (a, b, scale)
            entries.append(
                TableEntry(target, place(a), place(b), rank, num_in, width, scale, is_embedding)
            )
        rows.append(entries)

    num_targets = 1 + len(out_features)
    table = LoraTable.create(
        NUM_SLOTS,
        num_targets,
        packing.arena(),
        "cpu",
        max_rank=max(RANKS),
        lora_dtype=torch.float8_e4m3fn if is_float8 else dtype,
    )
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
    offsets = [sum(out_features[:k]) for k in range(len(out_features))]
    targets = tuple(range(1, num_targets))
    group = LoraGroup(targets, in_features, tuple(offsets), tuple(out_features))
    return Adapters(group, table, vocab, dense)


@dataclass
class Interpreter:
    """The Triton operations in the interpreter; they return the new `out`."""

    call: Callable[..., Any]

    def add_lora(
        self, adapters: Adapters, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan,
        **settings: int,
    ) -> torch.Tensor:  # fmt: skip
        table = without_views(adapters.table)
        return self.call("add_lora", out, x, table, plan, adapters.group, **settings)

    def add_lora_embedding(
        self, adapters: Adapters, out: torch.Tensor, token_ids: torch.Tensor, plan: LoraPlan
    ) -> torch.Tensor:
        table = without_views(adapters.table)
        return self.call("add_lora_embedding", out, token_ids, table, plan, EMBEDDING)

    def half(self, name: str, first: torch.Tensor, table: LoraTable, *args: Any) -> torch.Tensor:
        """What shrink or gather returns; the new `out` of expand."""
        return self.call("half", name, first, without_views(table), *args)


def without_views(table: LoraTable) -> LoraTable:
    """The kernels read the arena and the rows only; each view would pickle the whole arena."""
    return replace(table, _weights=tuple({} for _ in table.adapters))
