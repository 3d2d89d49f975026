"""Plans refilled at fixed addresses say what plans made anew say, and recorded steps see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import LayoutTarget, ModelLayout, lora_groups
from inference_svc.backends.cuda_graphs import CudaRecorder
from inference_svc.backends.cuda_inputs import StepBlock
from inference_svc.backends.cuda_lora import CudaLora
from inference_svc.backends.torch import LoraStep, plan_lora
from inference_svc.core import BASE_SLOT, BatchRow, Request, SamplingParams
from inference_svc.core import Sequence as OfTokens
from kernels.lora import TableEntry
from kernels.lora.plan import ITEM_NOTHING, TILE_TOKENS, LoraPlan

MAX_TOKENS, MAX_ROWS, NUM_SLOTS, MAX_RANK = 400, 16, 10, 33
IN, WIDTHS, GROUP = 1024, (512, 128, 128), "layers.0.qkv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXES = [
    [0],
    list(range(10)),
    [5] * 16,
    [BASE_SLOT] * 3 + [1, 1, 2, 3, 3, 3, 4],
    [9, BASE_SLOT],
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def make_arena(dtype: torch.dtype, device: str) -> Arena:
    """Adapters of different ranks and targets, anywhere in random memory."""
    targets = tuple(
        LayoutTarget(f"layers.0.{name}_proj", 0, GROUP, "linear", IN, width)
        for name, width in zip("qkv", WIDTHS, strict=True)
    )
    layout = ModelLayout("m", (), "", dtype, (1,), targets)
    arena = Arena(layout, 1 << 20, NUM_SLOTS, MAX_RANK, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    arena.flat.copy_(torch.randn(arena.flat.shape, generator=generator) * 0.05)
    for slot in range(NUM_SLOTS):
        arena.table.set_row(slot, entries_of(slot))
    return arena


def entries_of(slot: int) -> list[TableEntry]:
    return [
        TableEntry(target, 5 * slot + target, 7 * slot, 1 + 3 * slot, IN, width, 0.5 + target)
        for target, width in enumerate(WIDTHS)
        if (slot + target) % 3
    ]


class Bench:
    """A step's LoRA in a block of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.arena = make_arena(dtype, device)
        self.groups = lora_groups(self.arena.layout)
        num_bytes = CudaLora.num_bytes(MAX_TOKENS, MAX_ROWS)
        self.block = StepBlock(num_bytes, self.arena.device)
        self.lora = CudaLora(self.arena, self.groups, self.block, MAX_TOKENS, MAX_ROWS)

    def fill(self, rows: Sequence[BatchRow]) -> bool:
        self.block.wait()
        has_adapters = self.lora.fill(rows)
        self.block.send(0)
        return has_adapters

    def anew(self, rows: Sequence[BatchRow]) -> LoraStep | None:
        return plan_lora(rows, self.arena, self.groups)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, out = (
            torch.randn(num_tokens, width, generator=generator).to(self.arena.flat.dtype)
            for width in (IN, sum(WIDTHS))
        )
        return x.to(self.arena.device), out.to(self.arena.device)


def rows_of(
    slots: Sequence[int], lengths: Sequence[int] | None = None, samples: Sequence[bool] = ()
) -> list[BatchRow]:
    rows = []
    for index, slot in enumerate(slots):
        length = 1 if lengths is None else lengths[index]
        sequence = OfTokens(Request("r", (0,) * length, SamplingParams()))
        sequence.slot = slot
        rows.append(BatchRow(sequence, 0, length, samples[index] if samples else True))
    return rows


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRow]:
    """Rows of one slot are neighbours, in any order of slots."""
    order = draw(st.permutations(range(BASE_SLOT, NUM_SLOTS)))
    lengths = st.lists(st.integers(1, 2 * TILE_TOKENS + 2) | st.just(1), max_size=4)
    rows = [(slot, length) for slot in order for length in draw(lengths)]
    kept: list[tuple[int, int]] = []
    for slot, length in rows[:MAX_ROWS]:
        if sum(n for _, n in kept) + length <= MAX_TOKENS:
            kept.append((slot, length))
    samples = draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))
    return rows_of([slot for slot, _ in kept], [length for _, length in kept], samples)


@pytest.fixture(scope="module")
def shared() -> Bench:
    return Bench()


def assert_same(got: LoraPlan, wanted: LoraPlan) -> None:
    assert (got.num_tokens, got.segments) == (wanted.num_tokens, wanted.segments)
    assert got.targets >= wanted.targets
    assert got.max_rank >= wanted.max_rank
    assert got.has_tiles == wanted.has_tiles
    assert torch.equal(got.items, wanted.items)
    assert torch.equal(got.token_slots, wanted.token_slots)


@given(batch=batches())
def test_filled_plan_equals_a_new_plan(shared: Bench, batch: list[BatchRow]) -> None:
    """Whatever was filled before, and at the same addresses."""
    wanted = shared.anew(batch)
    assert shared.fill(batch) == (wanted is not None)
    if wanted is not None:
        got = shared.lora.step()
        assert_same(got.plan, wanted.plan)
        assert_same(got.head_plan, wanted.head_plan)
        at = [tensor.data_ptr() for tensor in (got.plan.items, got.plan.token_slots)]
        fixed = shared.lora.decode_step(1).plan
        assert at == [fixed.items.data_ptr(), fixed.token_slots.data_ptr()]


@given(slots=st.lists(st.integers(BASE_SLOT, NUM_SLOTS - 1), max_size=12), spare=st.integers(0, 4))
def test_decode_step_holds_every_batch_of_its_size(
    shared: Bench, slots: list[int], spare: int
) -> None:
    """What its rows do not use is base, and nothing; it claims every target, for all launches."""
    rows = rows_of(sorted([*slots, 2]))
    wanted = shared.anew(rows)
    assert wanted is not None
    shared.fill(rows_of([3] * MAX_ROWS))
    shared.fill(rows)
    plan, size = shared.lora.decode_step(len(rows) + spare).plan, len(rows) + spare
    assert plan.num_tokens == len(plan.token_slots) == size
    assert plan.targets == frozenset(range(len(WIDTHS)))
    assert not plan.has_tiles
    assert plan.token_slots.tolist() == wanted.plan.token_slots.tolist() + [BASE_SLOT] * spare
    num_items = len(wanted.plan.items)
    assert torch.equal(plan.items[:num_items], wanted.plan.items)
    assert (plan.items[num_items:] == ITEM_NOTHING).all()


def record(bench: Bench, x: torch.Tensor, before: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A decode step of as many rows as `x` has, to be replayed; on the CPU it is computed anew."""

    def compute() -> torch.Tensor:
        out = before.clone()
        bench.lora.decode_step(len(x)).add(GROUP, x, out)
        return out

    return CudaRecorder()(compute).replay if x.is_cuda else compute


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_replay_is_bitwise_a_new_plan(device: str, dtype: torch.dtype) -> None:
    bench = Bench(dtype, device)
    x, before = bench.inputs(MAX_ROWS)
    replay = record(bench, x, before)
    for slots in MIXES:
        rows = rows_of(slots)
        wanted, expected = bench.anew(rows), before.clone()
        assert wanted is not None
        wanted.add(GROUP, x[: len(rows)], expected[: len(rows)])
        bench.fill(rows)
        got = replay()
        assert torch.equal(got, expected), f"rows {slots}"
        assert not torch.equal(got, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_longer_rows_are_bitwise_a_new_plan(device: str, dtype: torch.dtype) -> None:
    bench = Bench(dtype, device)
    for slots, lengths in (([BASE_SLOT, 0, 1, 2, 3], [1, 8, 1, 2, 4]), ([4, 5], [300, 70])):
        rows = rows_of(slots, lengths)
        x, out = bench.inputs(sum(lengths))
        wanted, expected = bench.anew(rows), out.clone()
        assert wanted is not None
        wanted.add(GROUP, x, expected)
        bench.fill(rows)
        bench.lora.step().add(GROUP, x, out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_replay_sees_later_table_writes(device: str) -> None:
    """An adapter loaded after the recording is served: the table's address is what was recorded."""
    bench = Bench(torch.float16, device)
    bench.arena.table.clear_row(1)
    x, before = bench.inputs(4)
    replay = record(bench, x, before)
    bench.fill(rows_of([1] * 4))
    assert torch.equal(replay(), before)
    bench.arena.table.set_row(1, entries_of(1))
    assert not torch.equal(replay(), before)
