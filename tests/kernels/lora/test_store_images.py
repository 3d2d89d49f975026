"""Images of mixtures of experts as the store compiles them, in an arena: the products of every
expert are those of dense maths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from adapter_store.checkpoint.weights import ExpertWeights, Matrix
from adapter_store.images.compile import Image, compile_image
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import OtherName, Target, TargetKind
from kernels import lora
from kernels.lora import (
    GRANULE_BYTES,
    LoraGroup,
    LoraPlan,
    LoraTable,
    TableEntry,
    native,
    reference,
)
from tests.support.kernels.parts import join
from tests.support.native import native_library
from tests.support.store.format_2 import SCALE, Saved

HIDDEN, INNER, EXPERTS = 24, 40, 5
W1, W3, FUSED = (f"model.layers.0.mlp.experts.{name}" for name in ("w1", "w3", "w13"))
GROUP = LoraGroup((0, 1), HIDDEN, (0, INNER), (INNER, INNER))
FIRST_GRANULE = 7
"""Where the image lies in the arena."""
ROWS = [(0, 1), (0, 4), (1, 1), (2, 3), (3, 1), (3, 70), (4, 2)]
"""Expert and number of pairs."""
DTYPES = {torch.float32: DataType.FLOAT32, torch.bfloat16: DataType.BFLOAT16}


@dataclass
class Adapter:
    """Experts 0 and 1 share an A; 2 is missing; 3 and 4 have other ranks. `dense` is A [rank, in]
    and B [out of both targets, rank] of each expert."""

    saved: Saved
    experts: ExpertWeights
    dense: dict[int, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    ranks = {"shared": 3, "a3": 1, "a4": 9}
    names = {0: ("shared", "b0"), 1: ("shared", "b1"), 3: ("a3", "b3"), 4: ("a4", "b4")}
    tensors = {
        name: torch.randn(rank, HIDDEN, generator=generator) for name, rank in ranks.items()
    } | {b: torch.randn(2 * INNER, ranks[a], generator=generator) for a, b in names.values()}
    saved = Saved(tmp_path_factory.mktemp("experts"), tensors)
    matrices = {name: Matrix.of(record) for name, record in saved.records.items()}
    pairs = {expert: (matrices[a], matrices[b]) for expert, (a, b) in names.items()}
    records = tuple(saved.records.items())
    experts = ExpertWeights(FUSED, FUSED, 8.0, SCALE, EXPERTS, pairs, records)
    dense = {expert: (tensors[a], tensors[b]) for expert, (a, b) in names.items()}
    return Adapter(saved, experts, dense)


def layout(dtype: torch.dtype, **cut: tuple[int, int]) -> Layout:
    """Gate and up of all experts, which trainers save as one parameter."""
    targets = tuple(
        Target(
            *(name, 0, "w13", TargetKind.EXPERTS, HIDDEN, INNER, EXPERTS),
            other_names=(OtherName(FUSED, outputs=(part * INNER, (part + 1) * INNER)),),
            **cut,
        )
        for part, name in enumerate((W1, W3))
    )
    made = Layout("org/base", "0" * 64, DTYPES[dtype], 2, targets)
    validate(made)
    return made


def place(image: Image, layout: Layout, dtype: torch.dtype, rank_parts: int = 1) -> LoraTable:
    """A table whose slot 1 is the image."""
    arena = torch.full((1 << 15,), float("nan")).view(torch.uint8)
    start = FIRST_GRANULE * GRANULE_BYTES
    arena[start : start + len(image.buffer)] = image.buffer
    table = LoraTable.create(2, 2, arena.view(dtype), "cpu", max_rank=16, rank_parts=rank_parts)
    segments = image.plan.segments
    entries = []
    for a, b in zip(segments[::2], segments[1::2], strict=True):
        assert (a.kind, b.kind) == (SegmentKind.A, SegmentKind.B)
        granules = [FIRST_GRANULE + each.offset // GRANULE_BYTES for each in (a, b)]
        first, end = layout.targets[a.target].held_experts
        more = {"a_rank": a.rank, "num_experts": end - first}
        entries.append(TableEntry(a.target, *granules, b.rank, HIDDEN, INNER, **more))
    table.set_row(1, entries)
    return table


def inputs(plan: LoraPlan, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(plan.num_tokens, HIDDEN, generator=generator)
    return x.to(dtype), torch.randn(plan.num_tokens, 2 * INNER, generator=generator).to(dtype)


def plan_of(table: LoraTable, rows: list[tuple[int, int]]) -> LoraPlan:
    experts, lengths = zip(*rows, strict=True)
    return LoraPlan.build([1] * len(rows), lengths, table, "cpu", experts)


def dense_maths(
    adapter: Adapter, out: torch.Tensor, x: torch.Tensor, plan: LoraPlan, first: int = 0
) -> torch.Tensor:
    """`first` is the first expert that is held here."""
    out = out.double()
    for t, expert in enumerate(plan.token_experts.tolist()):
        if first + expert in adapter.dense:
            a, b = (each.double() for each in adapter.dense[first + expert])
            out[t] += SCALE * (b @ (a @ x[t].double()))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_expert_is_dense_maths(adapter, assert_close, ratio_of, dtype):
    whole = layout(dtype)
    image = compile_image(adapter.saved.checkpoint(adapter.experts), whole)
    offsets = [segment.offset for segment in image.plan.segments]
    assert offsets[0] == offsets[2], "one A for both targets"
    table = place(image, whole, dtype)
    weights = [table.weights(1, expert) for expert in range(EXPERTS)]
    assert [len(found[0].b) if found else 0 for found in weights] == [3, 3, 0, 1, 9]
    assert weights[0][0].a.data_ptr() == weights[1][0].a.data_ptr(), "its bytes are there once"
    plan = plan_of(table, ROWS)
    x, out = inputs(plan, dtype)
    expected = dense_maths(adapter, out, x, plan)
    results = {name: out.clone() for name in ("reference", "tensors", "native")}
    reference.add_lora_experts(results["reference"], x, table.arena, table, plan, GROUP)
    lora.add_lora_experts(results["tensors"], x, table.arena, table, plan, GROUP)
    native.add_lora_experts(native_library(), results["native"], x, table, plan, GROUP)
    for name, got in results.items():
        # The store rounds A and B to the layout's dtype.
        assert_close(name, expected, got.double(), ratio_of(dtype))


def test_experts_held_elsewhere(adapter, assert_close):
    """A plan's expert is counted among those held here."""
    cut = layout(torch.float32, expert_slice=(1, 4))
    image = compile_image(adapter.saved.checkpoint(adapter.experts), cut)
    table = place(image, cut, torch.float32)
    plan = plan_of(table, [(0, 2), (1, 1), (2, 3)])
    x, out = inputs(plan, torch.float32)
    expected, got = dense_maths(adapter, out, x, plan, first=1), out.clone()
    native.add_lora_experts(native_library(), got, x, table, plan, GROUP)
    assert_close("out", expected, got.double(), 2e-6)


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_the_store_cuts_the_rank_as_the_kernels_join_it(adapter, assert_close, num_parts):
    tables = []
    for part in range(num_parts):
        cut = layout(torch.float32, rank_part=(part, num_parts))
        image = compile_image(adapter.saved.checkpoint(adapter.experts), cut)
        tables.append(place(image, cut, torch.float32, num_parts))
    plan = plan_of(tables[0], ROWS)
    x, out = inputs(plan, torch.float32)
    expected = dense_maths(adapter, out, x, plan)
    ys = [reference.shrink(x, table.arena, table, plan, GROUP) for table in tables]
    y = join(ys, tables, plan, GROUP.targets)
    for table in tables:
        got = out.clone()
        reference.expand(got, y, table.arena, table, plan, GROUP)
        assert_close("out", expected, got.double(), 2e-6)
