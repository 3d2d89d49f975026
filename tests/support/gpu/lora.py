"""LoRA of one step at fixed addresses, with adapters of different ranks and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import applied_targets
from inference_svc.backends.arena import Arena
from inference_svc.backends.cuda.graphs import CudaRecorder
from inference_svc.backends.cuda.inputs import StepBlock
from inference_svc.backends.cuda.lora import CudaLora
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.lora_step import LoraStep, plan_lora
from inference_svc.core import BASE_SLOT, Batch, BatchRow, Request, SamplingParams
from inference_svc.core import Sequence as OfTokens
from kernels.lora import LoraPlan, TableEntry, add_lora, reference

MAX_TOKENS, MAX_ROWS, NUM_SLOTS, MAX_RANK = 400, 16, 10, 33
IN, WIDTHS, GROUP = 1024, (512, 128, 128), "layers.0.qkv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RATIOS = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
"""Relative RMS by which kernels may differ from the definition: they round the shrunk rows, and the
sum, to the dtype."""
MIXES = [
    [0],
    list(range(10)),
    [5] * 16,
    [BASE_SLOT] * 3 + [1, 1, 2, 3, 3, 3, 4],
    [9, BASE_SLOT],
]


def make_arena(dtype: torch.dtype, device: str) -> Arena:
    """Adapters of different ranks and targets, anywhere in random memory."""
    targets = tuple(
        Target(f"layers.0.{name}_proj", 0, GROUP, TargetKind.LINEAR, IN, width)
        for name, width in zip("qkv", WIDTHS, strict=True)
    )
    layout = ModelLayout("m", "", dtype, (1,), targets)
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
        self.targets = applied_targets(self.arena.layout)
        num_bytes = CudaLora.num_bytes(MAX_TOKENS, MAX_ROWS)
        self.block = StepBlock(num_bytes, self.arena.device, self.arena.streams.compute)
        self.lora = CudaLora(self.arena, self.targets, self.block, MAX_TOKENS, MAX_ROWS)

    def fill(self, rows: Sequence[BatchRow]) -> bool:
        """Returns whether any has an adapter."""
        self.block.wait()
        kind = self.lora.fill(Batch(tuple(rows)).columns())
        self.block.send()
        return kind is not StepKind.BASE

    def anew(self, rows: Sequence[BatchRow]) -> LoraStep | None:
        return plan_lora(rows, self.arena, self.targets)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, out = (
            torch.randn(num_tokens, width, generator=generator).to(self.arena.flat.dtype)
            for width in (IN, sum(WIDTHS))
        )
        return x.to(self.arena.device), out.to(self.arena.device)


def rows_of(
    slots: Sequence[int],
    lengths: Sequence[int] | None = None,
    samples: Sequence[bool] = (),
    activations: Sequence[int] = (),
) -> list[BatchRow]:
    rows = []
    for index, slot in enumerate(slots):
        length = 1 if lengths is None else lengths[index]
        activation = activations[index] if activations else 0
        request = Request("r", (0,) * length, SamplingParams(), activation=activation)
        sequence = OfTokens(request)
        sequence.slot = slot
        rows.append(BatchRow(sequence, 0, length, samples[index] if samples else True))
    return rows


def record(bench: Bench, x: torch.Tensor, before: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A decode step of as many rows as `x` has, to be replayed; on the CPU it is computed anew."""
    out = before.clone()

    def compute() -> None:
        out.copy_(before)
        bench.lora.padded_step(StepShape.of_decodes(StepKind.LORA, len(x))).add(GROUP, x, out, None)

    run = CudaRecorder()(compute).replay if x.is_cuda else compute

    def replay() -> torch.Tensor:
        run()
        return out.clone()

    return replay


def check_replays(bench: Bench) -> None:
    """A recorded decode step, refilled, is bitwise a step that was planned anew."""
    x, before = bench.inputs(MAX_ROWS)
    replay = record(bench, x, before)
    for slots in MIXES:
        rows = rows_of(slots)
        wanted, expected = bench.anew(rows), before.clone()
        assert wanted is not None
        wanted.add(GROUP, x[: len(rows)], expected[: len(rows)], None)
        bench.fill(rows)
        got = replay()
        assert torch.equal(got, expected), f"rows {slots}"
        assert not torch.equal(got, before)


def check_longer_rows(bench: Bench) -> None:
    """A step with prompts, refilled, is bitwise a step that was planned anew."""
    for slots, lengths in (([BASE_SLOT, 0, 1, 2, 3], [1, 8, 1, 2, 4]), ([4, 5], [300, 70])):
        rows = rows_of(slots, lengths)
        x, out = bench.inputs(sum(lengths))
        wanted, expected = bench.anew(rows), out.clone()
        assert wanted is not None
        wanted.add(GROUP, x, expected, None)
        bench.fill(rows)
        bench.lora.step().add(GROUP, x, out, None)
        assert torch.equal(out, expected)


def check_later_writes(bench: Bench) -> None:
    """An adapter loaded after the recording is served: the table's address is what was recorded."""
    bench.arena.table.clear_row(1)
    x, before = bench.inputs(4)
    replay = record(bench, x, before)
    bench.fill(rows_of([1] * 4))
    assert torch.equal(replay(), before)
    bench.arena.table.set_row(1, entries_of(1))
    assert not torch.equal(replay(), before)


def check_definition(bench: Bench, host: Arena) -> None:
    """What the kernels add is what the definition says over `host`, which has the same values:
    single tokens, prompts, and both beside rows of the base."""
    group = bench.targets.groups[GROUP]
    for slots, lengths in [
        *((mix, [1] * len(mix)) for mix in MIXES),
        ([BASE_SLOT, 0, 1, 2, 3], [5, 130, 1, 2, 17]),
    ]:
        x, out = bench.inputs(sum(lengths))
        plans = [LoraPlan.build(slots, lengths, a.table, a.device) for a in (bench.arena, host)]
        wanted = out.cpu()
        reference.add_lora(wanted, x.cpu(), host.flat, host.table, plans[1], group)
        add_lora(out, x, bench.arena.flat, bench.arena.table, plans[0], group)
        difference = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert difference < RATIOS[x.dtype], f"rows {slots} of {lengths} tokens"
