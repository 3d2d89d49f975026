"""Compares LoRA of one bench-200m step in native operations and in torch, without a base model.

    python -m bench.kernels.lora

Results are milliseconds for all layers, the best of many runs. GB/s counts each adapter's A and B
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.host_memory import allocate_host
from kernels.lora import GRANULE_BYTES, LoraGroup, LoraPlan, LoraTable, TableEntry, cpu
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.native.library import Program, load

NUM_LAYERS, HIDDEN, INNER, KV = 16, 1024, 2816, 256
NUM_ADAPTERS = 16
# Inputs, and outputs of each target, in one layer.
GROUPS = (
    (HIDDEN, (HIDDEN, KV, KV)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (INNER, INNER)),
    (INNER, (HIDDEN,)),
)
CASES = {
    "decode, 16 distinct": (range(16), [1] * 16),
    "decode, 4 adapters": ([i // 4 for i in range(16)], [1] * 16),
    "decode, 1 adapter": ([0] * 16, [1] * 16),
    "decode, 1 row": ([0], [1]),
    "prefill, 1 adapter": ([0], [1024]),
    "prefill, 16 distinct": (range(16), [64] * 16),
}


@dataclass(frozen=True)
class Setup:
    table: LoraTable
    groups: list[LoraGroup]
    adapter_bytes: int


def make_setup(rank: int, *, is_float8: bool = False) -> Setup:
    """Places adapters one after the other in an arena, as in their images."""
    dtype = torch.float8_e4m3fn if is_float8 else torch.bfloat16
    groups: list[LoraGroup] = []
    entries: list[list[TableEntry]] = [[] for _ in range(NUM_ADAPTERS)]
    granule, target = 0, 0
    for _ in range(NUM_LAYERS):
        for num_in, widths in GROUPS:
            targets = tuple(range(target, target + len(widths)))
            offsets = tuple(sum(widths[:k]) for k in range(len(widths)))
            groups.append(LoraGroup(targets, num_in, offsets, widths))
            target += len(widths)
    for adapter in entries:
        for group in groups:
            for index, width in zip(group.targets, group.out_features, strict=True):
                a = -(-rank * group.in_features * dtype.itemsize // GRANULE_BYTES)
                b = -(-rank * width * dtype.itemsize // GRANULE_BYTES)
                adapter.append(
                    TableEntry(index, granule, granule + a, rank, group.in_features, width)
                )
                granule += a + b
    arena = allocate_host(granule * GRANULE_BYTES).view(torch.bfloat16)
    if is_float8:
        arena.view(dtype).copy_(torch.randn(arena.nbytes) * 20)
    else:
        arena.normal_(std=0.02)
    table = LoraTable.create(
        NUM_ADAPTERS, target, arena, "cpu", max_rank=max(rank, 64), lora_dtype=dtype
    )
    for slot, adapter in enumerate(entries):
        table.set_row(slot, adapter)
    return Setup(table, groups, granule * GRANULE_BYTES // NUM_ADAPTERS)


def buffers(setup: Setup, num_tokens: int) -> dict[LoraGroup, tuple[torch.Tensor, torch.Tensor]]:
    """Returns x and out of each group of a layer; the layers share them, as in the model."""
    shapes = {(g.in_features, g.out_end) for g in setup.groups}
    made = {
        (i, o): (torch.randn(num_tokens, i).bfloat16(), torch.zeros(num_tokens, o).bfloat16())
        for i, o in shapes
    }
    return {g: made[g.in_features, g.out_end] for g in setup.groups}


def native_program(setup: Setup, slots: list[int], lengths: list[int]) -> Program:
    library = load()
    assert library is not None, "there are no native kernels to measure without a compiler"
    num_tokens = sum(lengths)
    plan = NativeLoraPlan(num_tokens)
    plan.fill(slots, lengths)
    lora, tensors = NativeLora.create(setup.table, plan), buffers(setup, num_tokens)
    ops = [op for group in setup.groups for op in lora.add_ops(group, *tensors[group])]
    return library.program(ops)


def torch_path(setup: Setup, slots: list[int], lengths: list[int]) -> Callable[[], None]:
    plan = LoraPlan.build(slots, lengths, setup.table, "cpu")
    tensors = buffers(setup, plan.num_tokens)

    def run() -> None:
        for group in setup.groups:
            x, out = tensors[group]
            cpu.add_lora(out, x, setup.table, plan, group)

    return run


def best_seconds(run: Callable[[], None], budget_s: float = 1.0) -> float:
    run()
    end, best = time.perf_counter() + budget_s, float("inf")
    while (start := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    for rank in (16, 64):
        setup, of_float8 = make_setup(rank), make_setup(rank, is_float8=True)
        print(f"rank {rank}, {setup.adapter_bytes / 1e6:.1f} MB per adapter")
        print(f"{'':22}{'native ms':>10}{'GB/s':>7}{'TFLOP/s':>9}{'torch ms':>10}{'float8 ms':>11}")
        for name, (rows, lengths) in CASES.items():
            slots = list(rows)
            ours = best_seconds(native_program(setup, slots, lengths).run)
            theirs = best_seconds(torch_path(setup, slots, lengths))
            small = best_seconds(native_program(of_float8, slots, lengths).run)
            read = len(set(slots)) * setup.adapter_bytes
            flops = sum(lengths) * setup.adapter_bytes  # 2 per bf16 of 2 bytes
            print(
                f"{name:22}{ours * 1e3:10.2f}{read / ours / 1e9:7.1f}{flops / ours / 1e12:9.3f}"
                f"{theirs * 1e3:10.2f}{small * 1e3:11.2f}"
            )


if __name__ == "__main__":
    main()
