"""Compares attention on the CPU in the C++ kernels and in torch, with its bytes and products.

    python -m bench.kernels.attention [--threads 2] [--repeats 20] [--only TEXT] [--out FILE]

A time is the minimum of the repetitions, for all layers of one step; with keys and values in bf16
and in FP8, in turns. Between two repetitions of ours, the processor's caches are overwritten, as a
step's weights would do. With one thread a time is the processor's, which other programs disturb
less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.models import decoder
from bench.results import write
from kernels.attention import FP8, AttentionPlan, KVCache, attend
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
    Work("1b decode 1 x 16000", BENCH_1B, [(15999, 1)]),
    Work("1b decode 16 x 4000", BENCH_1B, [(3999, 1)] * 16),
    Work("200m prompts 16 x 64", BENCH_200M, [(0, 64)] * 16),
    Work("200m prompt 512", BENCH_200M, [(0, 512)]),
    Work("200m prompt 2048", BENCH_200M, [(0, 2048)]),
    Work("200m chunk 512 at 1536", BENCH_200M, [(1536, 512)]),
]


def least_seconds(run: Callable[[], object], repeats: int, evict: Tensor | None = None) -> float:
    """Returns the least time of `run`. `evict` is written between two repetitions."""
    return least_in_turns([run], repeats, evict)[0]


def least_in_turns(
    runs: Sequence[Callable[[], object]], repeats: int, evict: Tensor | None = None
) -> list[float]:
    """Returns the least time of each of `runs`, which take turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, own in zip(runs, seconds, strict=True):
            if evict is not None:
                evict.add_(1)
            start = clock()
            run()
            own.append(clock() - start)
    return [min(own) for own in seconds]


@dataclass(frozen=True, slots=True)
class Seconds:
    """The times of one step's attention: ours with keys and values in bf16 and in FP8, torch's."""

    ours: float
    fp8: float
    torch: float


def measure(library: Library, work: Work, repeats: int) -> Seconds:
    s = work.shape
    contexts = [first + count for first, count in work.rows]
    counts = [-(-context // PAGE_SIZE) for context in contexts]
    pages = [part.tolist() for part in torch.randperm(sum(counts)).split(counts)]
    firsts, num_queries = zip(*work.rows, strict=True)
    plan = AttentionPlan.build(firsts, num_queries, pages, PAGE_SIZE)
    q = torch.randn(len(plan.cells), s.num_heads * s.head_dim).bfloat16()
    scale = s.head_dim**-0.5
    programs = []
    for stored in (torch.bfloat16, FP8):
        cache = _cache(s, sum(counts), stored, is_tiled=True)
        scratch = AttentionScratch(AttentionShape.of(cache, s.num_heads))
        ours, out = NativeAttention(cache, StepRows.of(plan), scratch), torch.empty_like(q)
        layers = [ours.attend_op(q, out, layer, scale=scale) for layer in range(s.num_layers)]
        programs.append(library.program([ours.items_op(), *layers]).run)
    in_rows = _cache(s, sum(counts), torch.bfloat16, is_tiled=False)

    def by_torch() -> None:
        for layer in range(s.num_layers):
            attend(q.unflatten(1, (s.num_heads, -1)), in_rows, layer, plan, scale=scale)

    evict = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    by_torch()
    plain, fp8 = least_in_turns(programs, repeats, evict)
    return Seconds(plain, fp8, least_seconds(by_torch, max(1, repeats // 5)))


def _cache(shape: Shape, num_pages: int, stored: torch.dtype, *, is_tiled: bool) -> KVCache:
    cache = KVCache.allocate(
        num_layers=shape.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
        stored=stored,
        is_tiled=is_tiled,
    )
    if cache.scales is None:
        cache.data.copy_(torch.randn(cache.data.shape))
    else:
        cache.data.random_(0x7F)
        cache.scales.fill_(1 / 448)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="work whose name contains this text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load()
    if library is None:
        raise SystemExit("there are no native kernels to compare")
    print(f"{library.variant}, {options.threads} threads, bf16; ms per step")
    rows = []
    for work in (each for each in WORK if options.only in each.name):
        took = measure(library, work, options.repeats)
        print(
            f"{work.name:24} ours {took.ours * 1e3:8.2f}   FP8 {took.fp8 * 1e3:8.2f}   "
            f"torch {took.torch * 1e3:8.2f}   {work.kv_bytes / took.ours / 1e9:6.1f} GB/s "
            f"{work.operations / took.ours / 1e9:6.0f} GFLOP/s",
            flush=True,
        )
        rows.append({"work": work.name, "seconds": asdict(took)})
    if options.out is not None:
        write(options.out, "attention", {"threads": options.threads, "rows": rows})


if __name__ == "__main__":
    main()
