"""Sums of several adapters: every implementation against the formula, next to single adapters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from kernels import lora
from kernels.lora import (
    BASE_SLOT,
    LoraGroup,
    LoraPlan,
    LoraTable,
    TableEntry,
    TableRow,
    add_lora,
    native,
    reference,
)
from kernels.lora.rows import ABSENT, OutputVectors, ReplacedWeight
from kernels.lora.table import MAX_PARTS, MixPart
from tests.support.kernels.adapters import without_views
from tests.support.kernels.packing import Packing

pytestmark = pytest.mark.matrix

IN, WIDTHS, VOCAB = 70, (96, 33, 40), 50
RANKS = (1, 3, 8, 16, 33, 5, 12)
VECTORS: dict[int, dict[int, set[str]]] = {
    3: {1: {"bias"}, 2: {"bias"}},
    5: {0: {"magnitude"}, 1: {"magnitude", "base_bias"}},
    6: {2: {"magnitude", "bias"}, 1: {"bias"}, 3: {"base_bias"}},
}
"""What adapters have of targets besides A and B."""
MIXES = (
    ((0, 1.0),),
    ((1, 0.5), (3, -2.0)),
    ((4, 1.0), (2, 0.0), (0, 3.0)),
    tuple((slot % 5, 0.25 * (slot + 1)) for slot in range(MAX_PARTS)),
    ((1, -1.5), (5, 1.0), (3, 0.5), (6, 1.0)),
    ((6, 1.0), (0, 2.0)),
)
MAX_LORAS = len(RANKS)
SLOTS = [
    *(BASE_SLOT, 0),
    *(MAX_LORAS + MAX_PARTS * mix for mix in (0, 1, 1, 2, 3, 3, 4, 4, 5)),
    *(4, 5, BASE_SLOT),
]
LENGTHS = [3, 5, 7, 1, 68, 2, 1, 9, 1, 70, 3, 66, 2, 1]
Dense = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


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
            kinds = sorted(VECTORS.get(slot, {}).get(target, ()))
            values = {kind: torch.rand(width) + 0.5 for kind in kinds}
            if "base_bias" in values:
                values["base_bias"] = values["base_bias"].to(dtype)
            granules = {kind: packing.place_as_it_is(each) for kind, each in values.items()}
            entries.append(
                TableEntry(
                    *(target, *places, rank, num_in, width, 0.75),
                    is_embedding=is_embedding,
                    vectors=OutputVectors(**granules),
                )
            )
            dense[slot, target] = (a, b, values)
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


def exact(
    out: torch.Tensor, inputs: torch.Tensor, dense: Dense, base_bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns the sums in fp64: the base's outputs, and of each part what it alone makes of them
    less these, times its scale. Of inputs that are token ids, those of the embedding."""
    total, base = out.double(), out.double()
    of_embedding = not inputs.is_floating_point()
    targets = [(0, 0, WIDTHS[0])] if of_embedding else _columns()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for slot, start, end in zip(SLOTS, starts, starts[1:], strict=False):
        rows = slice(start, end)
        for (adapter, scale), (target, first, width) in product(parts_of(slot), targets):
            if (adapter, target) not in dense:
                continue
            a, b, vectors = dense[adapter, target]
            columns = slice(first, first + width)
            old = torch.zeros(width) if base_bias is None else base_bias[columns]
            shrunk = a[inputs[rows]] if of_embedding else inputs[rows].double() @ a.double().t()
            alone = base[rows, columns] - old.double() + 0.75 * shrunk.double() @ b.double()
            alone = alone * vectors.get("magnitude", torch.ones(width)).double()
            alone += vectors.get("base_bias", old).double()
            # The row's scale is of a bias, too.
            alone += 0.75 * vectors.get("bias", torch.zeros(width)).double()
            total[rows, columns] += scale * (alone - base[rows, columns])
    return total


def _columns() -> list[tuple[int, int, int]]:
    """Returns each target of the group, its first column and its width."""
    return [(k + 1, sum(WIDTHS[:k]), width) for k, width in enumerate(WIDTHS)]


@dataclass
class Operands:
    x: torch.Tensor
    out: torch.Tensor
    base_bias: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, count: int = sum(LENGTHS)) -> Operands:
        torch.manual_seed(1)
        return cls(
            torch.randn(count, IN).to(dtype),
            torch.randn(count, sum(WIDTHS)).to(dtype),
            torch.randn(sum(WIDTHS)).to(dtype),
            torch.randint(0, VOCAB, (count,)),
            torch.randn(count, WIDTHS[0]).to(dtype),
        )

    def check(self, dense: Dense, out: torch.Tensor, rows: torch.Tensor, tolerance: float) -> None:
        for got, wanted in (
            (out, exact(self.out, self.x, dense, self.base_bias)),
            (rows, exact(self.rows, self.ids, dense, None)),
        ):
            error = (got.double() - wanted).abs().max() / wanted.abs().max()
            assert error < tolerance, error
        for base in (slice(None, 3), slice(-1, None)):
            assert torch.equal(out[base], self.out[base]), "base rows stay bitwise"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["reference", "torch", "native"])
def test_sums_are_the_formulas(path: str, dtype: torch.dtype, library: Any) -> None:
    table, group, dense = build(dtype)
    plan = LoraPlan.build(SLOTS, LENGTHS, table, "cpu")
    assert plan.has_mixes
    given = Operands.make(dtype)
    out, rows = given.out.clone(), given.rows.clone()
    operands = table.arena, table, plan
    if path == "native":
        native.add_lora(library, out, given.x, table, plan, group, given.base_bias)
        native.add_lora_embedding(library, rows, given.ids, table, plan, 0)
    else:
        ops = reference if path == "reference" else lora
        ops.add_lora(out, given.x, *operands, group, given.base_bias)
        ops.add_lora_embedding(rows, given.ids, *operands, 0)
    given.check(dense, out, rows, {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype])


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_sums_in_triton(interpreter: Any, dtype: torch.dtype) -> None:
    table, group, dense = build(dtype)
    plan = LoraPlan.build(SLOTS, LENGTHS, table, "cpu")
    given, read = Operands.make(dtype), without_views(table)
    args = (given.out, given.x, read, plan, group, given.base_bias)
    out = interpreter.call("add_lora_vectors", *args)
    rows = interpreter.call("add_lora_embedding", given.rows, given.ids, read, plan, 0)
    given.check(dense, out, rows, {torch.float32: 1e-5, torch.float16: 2e-3}[dtype])


def test_a_sum_in_triton_is_added_in_order_and_rounded_once(interpreter: Any) -> None:
    """Decode rows have the bits of sums in fp32, and single adapters those of a batch of their
    own."""
    table, group, _ = build(torch.float32)
    given, read = Operands.make(torch.float32, len(SLOTS)), without_views(table)
    found = {}
    for name, slots in (("mixed", SLOTS), ("single", [s if s < MAX_LORAS else -1 for s in SLOTS])):
        plan = LoraPlan.build(slots, [1] * len(slots), table, "cpu")
        args = (given.out, given.x, read, plan, group, given.base_bias)
        found[name] = interpreter.call("add_lora_vectors", *args)
    single = torch.tensor(SLOTS) < MAX_LORAS
    assert torch.equal(found["mixed"][single], found["single"][single])
    assert not torch.equal(found["mixed"], found["single"])


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


def table_with_weights() -> LoraTable:
    """Of three adapters; the last two have rows of weight 0 or all of weight 1."""
    arena = torch.zeros(1 << 12)
    table = LoraTable.create(3, 2, arena, "cpu", num_weights=2, num_mixes=2)
    entry = TableEntry(0, 1, 2, 4, 16, 16)
    table.set_row(0, TableRow.of([entry]))
    table.set_row(1, TableRow.of([entry], [ReplacedWeight(0, ABSENT, 3, 4, 2)]))
    table.set_row(2, TableRow.of([], [ReplacedWeight(1, 5)]))
    return table


def test_a_mixs_first_row_has_the_weights_of_all_parts() -> None:
    table = table_with_weights()
    table.set_mix(3, [MixPart(0, 0.5), MixPart(2, 1.0), MixPart(1, 1.0)])
    assert table.weight_rows[3].tolist() == [[0, 6], [4, 0], [5, 0], [2, 0]]
    assert not table.weight_rows[4:11].any()
    assert (table.b_ranks[3:11, 0] == torch.tensor([4, 0, 4, 0, 0, 0, 0, 0])).all()
    plan = LoraPlan.build([3], [1], table, "cpu")
    assert (plan.weights, plan.has_rows, plan.has_mixes) == ({0, 1}, True, True)


def test_an_earlier_mixs_parts_are_forgotten() -> None:
    table = table_with_weights()
    table.set_mix(11, [MixPart(0, 1.0)] * MAX_PARTS)
    table.set_mix(11, [MixPart(0, 2.0)])
    assert table.part_slots(11) == range(11, 12)
    assert not table.rows[12:19].any()


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([MixPart(0, 1.0), MixPart(1, 0.5)], "no other scale"),
        ([MixPart(1, 1.0), MixPart(1, 1.0)], "a weight appears twice"),
    ],
    ids=str,
)
def test_what_is_no_sum(parts: list[MixPart], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        table_with_weights().set_mix(3, parts)
