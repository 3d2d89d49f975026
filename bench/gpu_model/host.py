"""Measures the host's part of a decode step on a GPU, without a GPU.

    python -m bench.gpu_model.host [--rows 1,32,128,256] [--steps 300] [--out FILE]
    python -m bench.gpu_model.host --check

The GPU is idle during this part: the engine's schedule, prepare and settle, and the encoding of its
outputs, for the shape of Llama-3-8B at a context of 512 tokens. The recorded step itself is left
out. Each number of rows is measured with the base model, with one adapter for all rows, and with a
different adapter for each row. Results are medians.

`--check` writes nothing, and exits with status 1 if a step takes longer than its limit. A limit is
a multiple of the time of a fixed loop, measured before and after, so that a slow or busy machine
slows both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu_run.model import make_arena, read_description
from bench.gpu_run.sizes import LLAMA_8B
from bench.results import FOLDER, median, show, write
from inference_svc import core
from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.engine.compute.profiler import Marks
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.transport.messages import StepOutputs
from inference_svc.engine.transport.process_main import encode
from inference_svc.model.description import Decoder, KVPlace
from inference_svc.model.kv_caches import KVCaches
from kernels.attention import KVCache

SMALL_VOCABULARY = {"vocab_size": 512}
"""A few tokens are enough for the prompts, and no logits are computed."""
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
PAGE_SIZE, CONTEXT, MAX_LEN, MAX_TOKENS, RANK = 16, 512, 8192, 2048, 16
ARENA_BYTES = 8 << 20
WARM_UP_STEPS = 40
CHECK_ROUNDS, CHECK_STEPS = 5, 100
MOST_REFERENCES = {(1, 0): 2.8, (32, 0): 6.6, (32, 32): 6.9, (128, 0): 16.0, (128, 128): 16.8}
"""Limit of a step's time by rows and adapters, in units of `reference_s`: 1.25 times its time when
the limit was set."""
ENDLESS = core.SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True)


class NothingToCompute:
    """Replaces a decoder and its recorded step."""

    def __init__(self, decoder: Decoder) -> None:
        self.description = decoder

    def replay(self) -> None:
        """Leaves the logits as they are."""


class AlwaysResident:
    """Adapters that are always resident, by the number of their slot."""

    def add_waiter(self, key: core.AdapterKey, now_s: float, count: bool = True) -> None: ...
    def remove_waiter(self, key: core.AdapterKey, *, expired: bool = False) -> None: ...
    def ensure_loading(self, key: core.AdapterKey, now_s: float) -> None: ...
    def trace_load(self, key: core.AdapterKey, asker: Any, now_s: float) -> None: ...
    def release(self, key: core.AdapterKey) -> None: ...

    def is_schedulable(self, key: core.AdapterKey) -> bool:
        return True

    def acquire(self, key: core.AdapterKey) -> int:
        return int(str(key))

    def pop_ready(self) -> list[core.AdapterKey]:
        return []

    def pop_changes(self) -> tuple[Any, ...]:
        return ()


class HostTimes(NamedTuple):
    """Seconds of one step's parts. `run` is the rest: the step itself, up to its tokens."""

    schedule: float
    prepare: float
    settle: float
    encode: float
    run: float

    @property
    def host(self) -> float:
        return self.schedule + self.prepare + self.settle + self.encode

    @property
    def whole(self) -> float:
        return self.host + self.run


def make_backend(num_rows: int, num_adapters: int) -> CudaBackend:
    decoder = read_description(LLAMA_8B | SMALL_VOCABULARY)
    layout = build_layout(decoder, "bench", DTYPE)
    arena = make_arena(layout, ARENA_BYTES, num_adapters, RANK, CPU)
    cache = KVCache.allocate(
        num_layers=1, num_pages=num_rows * MAX_LEN // PAGE_SIZE // 8 + 1, page_size=PAGE_SIZE,
        num_kv_heads=1, head_dim=2, dtype=DTYPE,
    )  # fmt: skip
    limits = StepLimits(MAX_TOKENS, num_rows, MAX_LEN // PAGE_SIZE)
    nothing: Any = NothingToCompute(decoder)
    targets = applied_targets(layout)
    caches = KVCaches((cache,), {0: KVPlace(0, 0)}, cache.num_pages, PAGE_SIZE)
    return CudaBackend(nothing, caches, arena, targets, limits, lambda compute: nothing)


def engine_steps(
    backend: CudaBackend,
    num_rows: int,
    num_adapters: int,
    *,
    context: int,
    num_steps: int,
    page_size: int = PAGE_SIZE,
    vocab_size: int = 500,
    warm_up_steps: int = WARM_UP_STEPS,
    now_s: Callable[[], float] = time.perf_counter,
) -> Iterator[HostTimes]:
    """Returns the times of each decode step in an engine's loop, after a warm-up. The prompts of
    `context` tokens are not computed; any content of the pages serves as theirs."""
    limits = Limits(num_rows, MAX_TOKENS, MAX_TOKENS)
    scheduler = Scheduler(limits, States(Pages(backend.num_pages, page_size)), AlwaysResident())
    sampler = Sampler((), has_device_memory=backend.arena.device.type == "cuda")
    runner = Runner(backend, sampler, Marks(), scheduler.step_limit)
    settler = Settler(scheduler, frozenset(), MAX_LEN)
    for row in range(num_rows):
        digest = str(row % num_adapters) if num_adapters else ""
        prompt = tuple((row + 7 * index) % vocab_size for index in range(context))
        request = core.Request(f"request-{row:06}", prompt, ENDLESS, digest, arrival_s=float(row))
        scheduler.add(core.Sequence(request), 0.0)
    while len(scheduler.running) < num_rows or any(s.num_uncomputed > 1 for s in scheduler.running):
        batch = scheduler.schedule(1.0)
        assert batch is not None
        settler.settle(batch, [core.SampledToken(7) for row in batch.rows if row.samples], 1.0)
    for index in range(warm_up_steps + num_steps):
        times = _step(scheduler, runner, settler, 1.0 + 0.01 * index, now_s)
        if index >= warm_up_steps:
            yield times


def _step(
    scheduler: Scheduler,
    runner: Runner,
    settler: Settler,
    step_s: float,
    now_s: Callable[[], float],
) -> HostTimes:
    began_s = now_s()
    batch = scheduler.schedule(step_s)
    scheduled_s = now_s()
    assert batch is not None
    sampled, timings, lost, *_ = runner.run(batch)
    ran_s = now_s()
    assert not lost, "the device has no memory for the step"
    outputs = settler.settle(batch, sampled, step_s)
    settled_s = now_s()
    encode(StepOutputs(tuple(outputs)))
    encoded_s = now_s()
    return HostTimes(
        schedule=scheduled_s - began_s,
        prepare=timings.prepare,
        settle=settled_s - ran_s,
        encode=encoded_s - settled_s,
        run=ran_s - scheduled_s - timings.prepare,
    )


def measure(num_rows: int, num_adapters: int, num_steps: int) -> dict[str, Any]:
    """Returns the microseconds of each part, and their sum."""
    backend = make_backend(num_rows, num_adapters)
    found = list(
        engine_steps(backend, num_rows, num_adapters, context=CONTEXT, num_steps=num_steps)
    )
    parts = {
        name: 1e6 * median([getattr(times, name) for times in found])
        for name in ("schedule", "prepare", "settle", "encode")
    }
    return {
        "rows": num_rows,
        "adapters": num_adapters,
        **parts,
        "sum": 1e6 * median([times.host for times in found]),
    }


class _Item(NamedTuple):
    number: int
    values: list[int]


def reference_s() -> float:
    """Returns the seconds of a loop over objects, dictionaries and small arrays, which the host's
    part of a step uses too."""
    times = []
    for _ in range(CHECK_STEPS):
        began_s = time.perf_counter()
        items = [_Item(number, [number] * 4) for number in range(64)]
        by_number = {item.number: item for item in items}
        for item in items:
            by_number[item.number ^ 1].values.append(item.number)
        sizes = np.fromiter((len(item.values) for item in items), np.int64, len(items))
        np.repeat(sizes, sizes).cumsum()
        times.append(time.perf_counter() - began_s)
    return median(times)


def num_references(num_rows: int, num_adapters: int) -> float:
    """Returns a step's time in units of the loop's."""
    found = []
    for _ in range(CHECK_ROUNDS):
        before_s = reference_s()
        step_us = measure(num_rows, num_adapters, CHECK_STEPS)["sum"]
        found.append(step_us / (1e6 * (before_s + reference_s()) / 2))
    return median(found)


def check() -> bool:
    """Compares with the limits, and returns whether all hold."""
    rows = [[*work, num_references(*work), bar] for work, bar in MOST_REFERENCES.items()]
    show("host, in loops of reference", ["rows", "adapters", "measured", "at most"], rows)
    return all(measured <= bar for *_, measured, bar in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,32,128,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu_host.json")
    parser.add_argument("--check", action="store_true", help="compare with the limits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        sys.exit(0 if check() else 1)
    found = [
        measure(num_rows, num_adapters, options.steps)
        for num_rows in map(int, options.rows.split(","))
        for num_adapters in sorted({0, 1, num_rows})
    ]
    columns = list(found[0])
    show("host, microseconds", columns, [[row[column] for column in columns] for row in found])
    write(options.out, "gpu_host", {"steps": options.steps, "found": found})


if __name__ == "__main__":
    main()
