"""Divides the time of a decode step into its parts, with the floor: base, and an adapter for each
request.

    python -m bench.step_breakdown [--model bench-200m] [--requests 16] [--steps 30] [--out FILE]

Requests with 64 tokens in are in the middle of their output, and this thread calls the
engine's steps one by one. The benchmark first times the parts of steps, and then profiles as many
steps: the native program reports the time of each operation, and torch's profiler the torch path.
Their sum may differ from the whole computation's time by the cost of the profiler. Results are
medians. The floor, reached by the best kernel, and the hardware's bound (`bench.kernels.roofline`)
are computed for the steps' mean context.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.kernels.roofline import DECODE_SIZES, THREADS, ModelFloor
from bench.machine import best_kernels
from bench.models import SHAPES, Prepared, kv_bytes, prepare
from bench.plots import plot_bars
from bench.results import FOLDER, median, show, write
from bench.stepper import NUM_REQUESTS, Stepper
from inference_svc.engine.compute.runner import Runner, StepResult
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.policy.settle import Settler
from kernels.native.library import Program

MAX_ROWS = 40

Parts = dict[str, float]
"""Seconds by part of a step."""


def time_parts(stepper: Stepper) -> Parts:
    """Times one step in its parts."""
    spent = defaultdict[str, float](float)
    compute_s = 0.0

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal compute_s
            began_s = time.perf_counter()
            result = work(*arguments)
            spent[part] += time.perf_counter() - began_s
            if isinstance(result, StepResult):
                compute_s += result.timings.forward + result.timings.sample
            return result

        return call

    # Methods are replaced in the classes, because the objects are frozen.
    owners = ((Scheduler, "schedule"), (Runner, "run"), (Settler, "settle"))
    with ExitStack() as stack:
        for owner, method in owners:
            stack.enter_context(replaced(owner, method, timed(method, getattr(owner, method))))
        began_s = time.perf_counter()
        stepper.step()
        whole_s = time.perf_counter() - began_s
    return {
        "schedule": spent["schedule"],
        "inputs and plan": spent["run"] - compute_s,
        "compute and sample": compute_s,
        "settle": spent["settle"],
        "rest of the step": whole_s - sum(spent.values()),
        "whole": whole_s,
    }


@contextmanager
def replaced(owner: type, method: str, work: Callable[..., Any]) -> Iterator[None]:
    """Replaces `owner.method` with `work` within the context."""
    plain = getattr(owner, method)
    setattr(owner, method, work)
    try:
        yield
    finally:
        setattr(owner, method, plain)


def native_operations(stepper: Stepper) -> Parts:
    """Returns the seconds of one step's operations; empty if no native program ran."""
    spent: Parts = defaultdict(float)

    def run(program: Program, num_threads: int | None = None) -> None:
        for name, seconds in name_operations(program.profile()).items():
            spent[name] += seconds

    with replaced(Program, "run", run):
        stepper.step()
    return dict(spent)


def torch_operations(stepper: Stepper) -> Parts:
    """Returns the seconds of one step's operations, by torch's own names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stepper.step()
    return {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}


def name_operations(ops: Sequence[tuple[str, float]]) -> Parts:
    """Sums seconds by name. In a whole step, each projection's products get their own name: four
    for each layer in turn, then the head."""
    products = [index for index, (name, _) in enumerate(ops) if name.startswith("linear")]
    names: dict[int, str] = {}
    if len(products) % 4 == 1:
        turn = ("qkv", "o", "gate_up", "down")
        names = {index: f"linear {turn[i % 4]}" for i, index in enumerate(products)}
        names[products[-1]] = "linear head"
    spent: Parts = defaultdict(float)
    for index, (name, seconds) in enumerate(ops):
        spent[names.get(index, name)] += seconds
    return dict(spent)


def account(
    prepared: Prepared, num_requests: int, num_adapters: int, num_steps: int
) -> tuple[dict[str, Parts], float]:
    """Returns medians over the steps (the step's parts, and the computation's operations), and the
    steps' mean context."""
    stepper = Stepper(prepared, num_adapters, num_requests)
    first = stepper.context
    parts = [time_parts(stepper) for _ in range(num_steps)]
    operations = [native_operations(stepper) for _ in range(num_steps)]
    if not any(operations):
        operations = [torch_operations(stepper) for _ in range(num_steps)]
    last = stepper.context - 1
    stepper.close()
    return {"parts": _medians(parts), "operations": _medians(operations)}, (first + last) / 2


def _medians(observed: list[Parts]) -> Parts:
    names = {name: None for one in observed for name in one}
    found = {name: median([one.get(name, 0.0) for one in observed]) for name in names}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def floors(
    floor: ModelFloor, name: str, num_requests: int, num_adapters: int, context: float
) -> dict[str, Parts]:
    """Returns the floor and the bound of the step's parts. A step reads and writes each recurrent
    state once."""
    measured, size = floor.measure(9), str(num_requests)
    read = measured["read_bytes_per_second"]
    reading = {
        "keys and values": kv_bytes(name, round(num_requests * context)) / read,
        "recurrent states": 2 * num_requests * floor.state_bytes / read,
        "adapters": num_adapters * floor.adapter_bytes / read,
    }
    return {
        kind: {what: measured[f"{what}_{key}"][size] for what in ("projections", "head")} | reading
        for kind, key in (("floor", "seconds"), ("bound", "bound_seconds"))
    }


def shares(found: dict[str, dict[str, Parts]]) -> dict[str, Parts]:
    """Returns floor and bound for each kind of step, as shares of the whole step."""
    return {
        kind: {what: sum(one[what].values()) / one["parts"]["whole"] for what in ("floor", "bound")}
        for kind, one in found.items()
    }


def show_table(title: str, what: str, found: dict[str, dict[str, Parts]]) -> None:
    """Shows parts or operations, the largest first, and their sum."""
    names = list({name: None for kind in found.values() for name in kind[what]})
    names.sort(key=lambda name: -max(kind[what].get(name, 0.0) for kind in found.values()))
    rows = [
        [name, *(1e3 * kind[what].get(name, 0.0) for kind in found.values())]
        for name in names[:MAX_ROWS]
    ]
    if what != "parts":  # the parts include the whole
        rows.append(["sum", *(1e3 * sum(kind[what].values()) for kind in found.values())])
    show(title, ("", *found), rows)


def plot_account(path: Path, found: dict[str, dict[str, Parts]]) -> None:
    """Draws the largest operations and the time outside the computation, with the floor and the
    bound."""
    whole = {kind: one["parts"]["whole"] for kind, one in found.items()}
    merged: dict[str, Parts] = {}
    for kind, one in found.items():
        around = {n: s for n, s in one["parts"].items() if n not in ("whole", "compute and sample")}
        merged[kind] = one["operations"] | {
            "around the computation": sum(around.values()),
            "whole step": whole[kind],
            "floor": sum(one["floor"].values()),
            "bound": sum(one["bound"].values()),
        }
    last = next(reversed(merged.values()))
    names = sorted(last, key=lambda name: -last[name])[:12]
    series = {kind: [1e3 * one.get(name, 0.0) for name in names] for kind, one in merged.items()}
    plot_bars(path, "One decode step", "ms", names, series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--requests", type=int, choices=DECODE_SIZES, default=NUM_REQUESTS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=FOLDER / "step_breakdown.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    requests = options.requests
    prepared = prepare(options.model, requests)
    counts = {"base": 0, f"{requests} adapters": requests}
    found: dict[str, dict[str, Parts]] = {}
    contexts: dict[str, float] = {}
    for kind, count in counts.items():
        found[kind], contexts[kind] = account(prepared, requests, count, options.steps)
    floor = ModelFloor(options.model)
    for kind, count in counts.items():
        found[kind] |= floors(floor, options.model, requests, count, contexts[kind])
    for what in ("parts", "operations", "floor", "bound"):
        show_table(f"{what} of one step, ms ({best_kernels()})", what, found)
    of_whole = shares(found)
    rows = [[what, *(of_whole[kind][what] for kind in found)] for what in ("floor", "bound")]
    show("of the whole step", ("", *found), rows)
    measured = {
        "requests": requests,
        "context": contexts,
        "seconds": found,
        "shares of the whole step": of_whole,
    }
    write(options.out, "account", {"model": options.model, **measured})
    plot_account(options.out.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
