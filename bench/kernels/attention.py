"""Compares attention on the CPU in the C++ kernels and in torch, with its bytes and products.

    python -m bench.kernels.attention [--threads 2] [--repeats 20]

A time is the minimum of the repetitions, for all layers of one step. Between two repetitions of
ours, the processor's caches are overwritten, as a step's weights would do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.models import decoder
from kernels.attention import AttentionPlan, KVCache, attend
from kernels.attention.native import NativeAttention, StepRows
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.native.library import Library, load

PAGE_SIZE = 16
EVICTED_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: str) -> Shape:
        found = decoder(model)
        first = found.attentions[0]
        return cls(found.num_layers, first.num_heads, first.num_kv_heads, first.head_dim)


@dataclass(frozen=True, slots=True)
class Work:
    """Rows, each as (first position, number of queries)."""

    name: str
    shape: Shape
    rows: list[tuple[int, int]]

    @property
    def kv_bytes(self) -> int:
        cells = sum(first + count for first, count in self.rows)
        s = self.shape
        return cells * s.num_layers * s.num_kv_heads * s.head_dim * 2 * 2

    @property
    def operations(self) -> int:
        seen = sum(sum(range(first + 1, first + count + 1)) for first, count in self.rows)
        return seen * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * 4


BENCH_200M, BENCH_1B = Shape.of("bench-200m"), Shape.of("bench-1b")
WORK = [
    Work("200m decode 16 x 80", BENCH_200M, [(79, 1)] * 16),
    Work("200m decode 16 x 512", BENCH_200M, [(511, 1)] * 16),
    Work("200m decode 1 x 4000", BENCH_200M, [(3999, 1)]),
    Work("1b decode 16 x 80", BENCH_1B, [(79, 1)] * 16),
    Work("1b decode 4 x 2000", BENCH_1B, [(1999, 1)] * 4),
    Work("200m prompts 16 x 64", BENCH_200M, [(0, 64)] * 16),
    Work("200m prompt 512", BENCH_200M, [(0, 512)]),
    Work("200m prompt 2048", BENCH_200M, [(0, 2048)]),
    Work("200m chunk 512 at 1536", BENCH_200M, [(1536, 512)]),
]


def least_seconds(run: Callable[[], object], repeats: int, evict: Tensor | None = None) -> float:
    seconds = []
    for _ in range(repeats):
        if evict is not None:
            evict.add_(1)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(library: Library, work: Work, repeats: int) -> tuple[float, float]:
    """Returns the seconds of one step's attention, ours and torch's."""
    s = work.shape
    contexts = [first + count for first, count in work.rows]
    counts = [-(-context // PAGE_SIZE) for context in contexts]
    pages = [part.tolist() for part in torch.randperm(sum(counts)).split(counts)]
    firsts, num_queries = zip(*work.rows, strict=True)
    plan = AttentionPlan.build(firsts, num_queries, pages, PAGE_SIZE)
    caches = [
        KVCache.allocate(
            num_layers=s.num_layers,
            num_pages=sum(counts),
            page_size=PAGE_SIZE,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            dtype=torch.bfloat16,
            is_tiled=is_tiled,
        )
        for is_tiled in (True, False)
    ]
    for cache in caches:
        cache.data.normal_()
    q = torch.randn(len(plan.cells), s.num_heads * s.head_dim).bfloat16()
    out, scale = torch.empty_like(q), s.head_dim**-0.5
    scratch = AttentionScratch(AttentionShape.of(caches[0], s.num_heads))
    ours = NativeAttention(caches[0], StepRows.of(plan), scratch)
    layers = [ours.attend_op(q, out, layer, scale=scale) for layer in range(s.num_layers)]
    program = library.program([ours.items_op(), *layers])

    def by_torch() -> None:
        for layer in range(s.num_layers):
            attend(q.unflatten(1, (s.num_heads, -1)), caches[1], layer, plan, scale=scale)

    evict = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    by_torch()
    return (
        least_seconds(program.run, repeats, evict),
        least_seconds(by_torch, max(1, repeats // 5)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load()
    if library is None:
        raise SystemExit("there are no native kernels to compare")
    print(f"{library.variant}, {options.threads} threads, bf16; ms per step")
    for work in WORK:
        ours, by_torch = measure(library, work, options.repeats)
        print(
            f"{work.name:24} ours {ours * 1e3:8.2f}   torch {by_torch * 1e3:8.2f}   "
            f"{work.kv_bytes / ours / 1e9:6.1f} GB/s {work.operations / ours / 1e9:6.0f} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
