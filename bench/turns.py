"""Compares the speed of two checkouts in turns.

    python -m bench.turns BASELINE [--works throughput,ttft,...] [--rounds 9] [--out FILE]

BASELINE is a checkout of another commit that has this module too. It runs twice, so that each
figure comes with the difference between two runs of the same code; this checkout runs once. All
processes live for the whole run, on the same model and adapters. Within a round they take turns, in
a different order each time, and one works while the others wait. Results are medians over the
rounds, after a first round to warm up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

from bench.kernels.roofline import THREADS
from bench.models import ROOT as MODELS
from bench.models import make_variants, prepare
from bench.results import FOLDER, median, show, write
from bench.services import Services
from bench.store import cold as store_cold
from bench.store import pull as store_pull
from bench.systems.ours import make_system
from bench.systems.serve import serve, take_standard_output
from bench.systems.worker import Worker
from bench.workloads import many_adapters
from bench.workloads.throughput import NUM_ADAPTERS, ROWS, Row, make_job, make_spec
from bench.workloads.trace import Traffic
from bench.workloads.ttft import NUM_IN, OverGrpc, wanted_for

MODEL = "bench-200m"
NUM_OUT = 32
NUM_LAYERS = 16
W4_ADAPTERS = (5, 200)
W4_WINDOW_S = 10.0
SIDES = ("baseline", "baseline again", "this")

Figures = dict[str, float]
Works = Mapping[str, Callable[[], Figures]]


@contextmanager
def throughput_works(models: Path) -> Iterator[Works]:
    """Yields W1's rows with 16 requests, base and 16 adapters, in output tokens per second."""
    prepared = prepare(MODEL, NUM_ADAPTERS, models)
    system = make_system()
    system.load(make_spec(prepared, NUM_ADAPTERS))

    def run(row: Row) -> Figures:
        system.set_resident([str(index) for index in range(row.resident)])
        done = system.run(make_job(row, prepared, NUM_OUT))
        return {f"{row.name}, tokens/s": done.num_tokens / done.seconds}

    rows = {row.name: row for row in ROWS}
    try:
        yield {name: lambda row=rows[name]: run(row) for name in ("base", "16 adapters")}  # type: ignore[misc]
    finally:
        system.close()


@contextmanager
def ttft_works(models: Path) -> Iterator[Works]:
    """Yields W2 over gRPC, in milliseconds to the first token."""
    prepared = prepare(MODEL, NUM_ADAPTERS, models)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folders = make_variants(prepared.adapters["0"], folder / "adapters")
        with Services(wanted_for(prepared, folder, NUM_IN), folder) as services:
            grpc = OverGrpc(prepared, services, folders, NUM_IN)
            measured = {
                "base": grpc.base,
                "resident": grpc.resident,
                "cold": grpc.cold,
                "registered and cold": grpc.registered_and_cold,
            }
            yield {
                what: lambda what=what, work=work: {f"{what}, ms": 1e3 * work()}  # type: ignore[misc]
                for what, work in measured.items()
            }


@contextmanager
def store_cold_works(models: Path) -> Iterator[Works]:
    """Yields the phases of `bench.store.cold`, in milliseconds."""

    def run() -> Figures:
        found = store_cold.measure(1, NUM_LAYERS)["milliseconds"]
        return {
            f"{source}, {phase}, ms": milliseconds
            for source, phases in found.items()
            for phase, milliseconds in phases.items()
        }

    yield {"store_cold": run}


@contextmanager
def many_adapters_works(models: Path) -> Iterator[Works]:
    """Yields W4 with all requests at once, for adapters that fit the arena and for more, in output
    tokens per second."""
    prepared = prepare(MODEL, 1, models)
    engine, digests = many_adapters.start_engine(prepared, max(W4_ADAPTERS))
    driver = many_adapters.Driver(engine, digests, prepared.vocab)
    engine.load(digests)

    def run(num_adapters: int) -> Figures:
        played = driver.play(Traffic(num_adapters), W4_WINDOW_S, seed=0)
        return {f"{num_adapters} adapters, tokens/s": played["tokens_per_second"]}

    try:
        yield {str(n): lambda n=n: run(n) for n in W4_ADAPTERS}  # type: ignore[misc]
    finally:
        engine.stop()


@contextmanager
def store_pull_works(models: Path) -> Iterator[Works]:
    """Yields the rates of `bench.store.pull`, in megabytes per second."""

    def run() -> Figures:
        found = store_pull.measure(1, NUM_LAYERS)
        return {f"{what}, MB/s": rates[0] for what, rates in found.items()}

    yield {"store_pull": run}


WORKS = {
    "throughput": throughput_works,
    "ttft": ttft_works,
    "many_adapters": many_adapters_works,
    "store_cold": store_cold_works,
    "store_pull": store_pull_works,
}


def serve_works(kind: str, models: Path) -> None:
    """Runs the work named in each message, and replies with its figures."""
    answers = take_standard_output()
    with WORKS[kind](models) as works:
        actions = {"works": lambda: sorted(works), **works}
        serve(lambda message: actions[message["action"]](), answers)


def start(checkout: Path, side: str, kind: str, models: Path, log: Path) -> Worker:
    """Starts a checkout's process for one kind of work."""
    command = [sys.executable, "-m", "bench.turns", "--serve", kind, "--models", str(models)]
    variables = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(THREADS)}
    return Worker(side, command, log, variables, checkout)


def measure(baseline: Path, kind: str, models: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns each side's results of each figure, round by round."""
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkouts = (baseline, baseline, Path.cwd())
        sides = [
            stack.enter_context(start(checkout.resolve(), side, kind, models, logs / side))
            for checkout, side in zip(checkouts, SIDES, strict=True)
        ]
        orders = list(permutations(sides))
        works = sides[0].ask("works")
        for round_index in range(rounds + 1):
            for work in works:
                for side in orders[round_index % len(orders)]:
                    figures: Figures = side.ask(work)
                    side.wait_for_rest()
                    for figure, value in figures.items():
                        if round_index:
                            found.setdefault(figure, {}).setdefault(side.name, []).append(value)
    return found


def summarize(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Returns medians, and the ratios of this checkout and of the baseline to the baseline."""
    summary = {}
    for figure, sides in found.items():
        first, again, this = (median(sides[side]) for side in SIDES)
        both = median([*sides["baseline"], *sides["baseline again"]])
        summary[figure] = {
            "baseline": both,
            "this": this,
            "this / baseline": this / both,
            "baseline / itself": first / again,
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("baseline", type=Path, nargs="?", help="checkout of another commit")
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=FOLDER / "turns.json")
    parser.add_argument("--serve", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, default=MODELS.resolve(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_works(options.serve, options.models)
        return
    if options.baseline is None:
        parser.error("name a checkout of the commit to compare with")
    prepare(MODEL, NUM_ADAPTERS, options.models)
    found: dict[str, dict[str, Any]] = {}
    for kind in options.works.split(","):
        for figure, sides in measure(
            options.baseline, kind, options.models, options.rounds
        ).items():
            found[f"{kind}: {figure}"] = sides
    summary = summarize(found)
    columns = ["", "baseline", "this", "this / baseline", "baseline / itself"]
    rows = [[figure, *values.values()] for figure, values in summary.items()]
    show(f"medians of {options.rounds} rounds", columns, rows)
    write(options.out, "turns", {"rounds": options.rounds, "summary": summary, "found": found})


if __name__ == "__main__":
    main()
