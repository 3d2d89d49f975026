"""Adapters in an arena, batches by popularity, and a process that runs the Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.lora import (
    BASE_SLOT,
    LoraGroup,
    LoraPlan,
    LoraTable,
    TableEntry,
    reference,
)
from tests.kernels.lora.packing import Packing

OPERATIONS = Path(__file__).parent / "operations.py"
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
    dtype: torch.dtype, in_features: int, out_features: Sequence[int], vocab: int
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
            dense[slot, target] = (a, b, scale)
            entries.append(
                TableEntry(target, place(a), place(b), rank, num_in, width, scale, is_embedding)
            )
        rows.append(entries)

    num_targets = 1 + len(out_features)
    table = LoraTable.create(NUM_SLOTS, num_targets, packing.arena(), "cpu", max_rank=max(RANKS))
    for slot, entries in enumerate(rows):
        table.set_row(slot, entries)
    offsets = [sum(out_features[:k]) for k in range(len(out_features))]
    targets = tuple(range(1, num_targets))
    group = LoraGroup(targets, in_features, tuple(offsets), tuple(out_features))
    return Adapters(group, table, vocab, dense)


@pytest.fixture(scope="session")
def make_adapters():
    """`make_adapters(dtype, in_features, out_features, vocab)`; made once per combination."""
    made: dict[Any, Adapters] = {}

    def make(
        dtype: torch.dtype, in_features: int = 70, out_features: tuple[int, ...] = (96, 33, 40),
        vocab: int = 50,
    ) -> Adapters:  # fmt: skip
        key = (dtype, in_features, out_features, vocab)
        if key not in made:
            made[key] = build_adapters(*key)
        return made[key]

    return make


@pytest.fixture(scope="session")
def ratio_of():
    return RATIOS.__getitem__


def popular_slots(popularity: str, num_rows: int) -> list[int]:
    """Slots of `num_rows` rows in batch order: neighbours share a slot, base rows come first."""
    if popularity == "empty":
        slots = [BASE_SLOT] * num_rows
    elif popularity == "identical":
        slots = [2] * num_rows
    elif popularity == "distinct":
        slots = list(range(num_rows))
    elif popularity == "uniform":
        slots = [row % math.ceil(math.sqrt(num_rows)) for row in range(num_rows)]
    elif popularity == "skewed":  # each adapter has 1.5 times the rows of the next
        slots = [int(math.log(row + 1, 1.5)) for row in range(num_rows)]
    else:
        generator = torch.Generator().manual_seed(num_rows)
        weights = torch.arange(1, 9).float() ** -1.5
        slots = torch.multinomial(weights, num_rows, True, generator=generator).tolist()
    return sorted(slots)


def with_base_rows(slots: list[int]) -> list[int]:
    """Every third row turned into a base row."""
    return sorted(BASE_SLOT if row % 3 == 2 else slot for row, slot in enumerate(slots))


@pytest.fixture(scope="session")
def slots_of():
    """`slots_of(popularity, num_rows, mixed)`."""

    def slots(popularity: str, num_rows: int, mixed: bool = False) -> list[int]:
        found = popular_slots(popularity, num_rows)
        return with_base_rows(found) if mixed else found

    return slots


@dataclass
class Interpreter:
    """The Triton operations in the interpreter; they return the new `out`."""

    call: Callable[..., Any]

    def add_lora(
        self, adapters: Adapters, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan,
        **settings: int,
    ) -> torch.Tensor:  # fmt: skip
        table = _without_views(adapters.table)
        return self.call("add_lora", out, x, table, plan, adapters.group, **settings)

    def add_lora_embedding(
        self, adapters: Adapters, out: torch.Tensor, token_ids: torch.Tensor, plan: LoraPlan
    ) -> torch.Tensor:
        table = _without_views(adapters.table)
        return self.call("add_lora_embedding", out, token_ids, table, plan, EMBEDDING)

    def half(self, name: str, first: torch.Tensor, table: LoraTable, *args: Any) -> torch.Tensor:
        """What shrink or gather returns; the new `out` of expand."""
        return self.call("half", name, first, _without_views(table), *args)


def _without_views(table: LoraTable) -> LoraTable:
    """The kernels read the arena and the rows only; each view would pickle the whole arena."""
    return replace(table, _weights=tuple({} for _ in table.adapters))


@pytest.fixture(scope="session")
def interpreter(start_worker):
    return Interpreter(start_worker(OPERATIONS, interpret=True).call)


@pytest.fixture(scope="session")
def compiler(start_worker):
    return start_worker(OPERATIONS, interpret=False)
