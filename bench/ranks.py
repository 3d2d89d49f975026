"""Measures decode steps of a model that several processes compute together, on this machine.

    python -m bench.ranks [--models bench-tiny bench-200m] [--ranks 1 2 4] [--stages 1 2]
        [--requests 1 16] [--rounds 5] [--out FILE]

Every round makes an engine of each number of ranks and stages, which share all cores, and one with
a single thread, and times some of its steps: other work on the machine slows all of them alike. A
step's exchanges include the time in which rank 0 waits for the others: of stages, while they
compute. Adapters are not used.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from bench.kernels.roofline import DECODE_SIZES, THREADS
from bench.models import SHAPES, Prepared, prepare
from bench.results import FOLDER, median, show, write
from bench.stepper import Stepper

NUM_STEPS = 60
MAX_RANKS = 4
"""Of all stages together, where there are several."""


class Form(NamedTuple):
    """How an engine computes: each stage has so many ranks, and each rank so many threads."""

    ranks: int
    threads: int
    stages: int = 1

    def __str__(self) -> str:
        of_stage = f"{self.ranks} x {self.threads}"
        return of_stage if self.stages == 1 else f"{self.stages} stages of {of_stage}"


class Sample(NamedTuple):
    """The seconds of a step, and of its exchanges."""

    step_s: float
    exchange_s: float


def forms(ranks: list[int], stages: list[int]) -> list[Form]:
    """Returns the forms: one thread, and each number of ranks with an equal part of the cores, in
    each number of stages, of which one computes at a time."""
    made = [
        Form(count, max(1, THREADS // count), num_stages)
        for num_stages in stages
        for count in ranks
        if num_stages == 1 or num_stages * count <= MAX_RANKS
    ]
    return list(dict.fromkeys((Form(1, 1), *made)))


def sample(prepared: Prepared, form: Form, requests: int) -> Sample:
    """Measures steps of an engine; returns the medians of a step's seconds, and the mean of its
    exchanges'."""
    stepper = Stepper(
        prepared,
        0,
        requests,
        num_threads=form.threads,
        num_ranks=form.ranks,
        num_stages=form.stages,
        max_len=1024,
    )
    try:
        before_s, seconds = _exchange_s(stepper), []
        for _ in range(NUM_STEPS):
            began_s = time.perf_counter()
            stepper.step()
            seconds.append(time.perf_counter() - began_s)
        return Sample(median(seconds), (_exchange_s(stepper) - before_s) / NUM_STEPS)
    finally:
        stepper.close()


def _exchange_s(stepper: Stepper) -> float:
    ranks = stepper.built.ranks
    exchange = None if ranks is None else ranks.report.exchange
    return 0.0 if exchange is None else exchange.seconds


def measure(
    models: list[str], all_forms: list[Form], requests: list[int], rounds: int
) -> list[Any]:
    """Returns a row for each model, number of requests, and form. `beside_exchanges_ms` of one
    stage is the time of rank 0's own work."""
    samples: defaultdict[tuple[str, int, Form], list[Sample]] = defaultdict(list)
    for _ in range(rounds):
        for model in models:
            for count in requests:
                for form in all_forms:
                    found = sample(prepare(model, 1), form, count)
                    samples[model, count, form].append(found)
    return [
        {
            "model": model,
            "requests": count,
            "ranks x threads": str(form),
            "step_ms": 1e3 * median([each.step_s for each in found]),
            "exchanges_ms": 1e3 * median([each.exchange_s for each in found]),
            "beside_exchanges_ms": 1e3 * median([each.step_s - each.exchange_s for each in found]),
        }
        for (model, count, form), found in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["bench-tiny", "bench-200m"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", choices=DECODE_SIZES, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "ranks.json")
    options = parser.parse_args()
    all_forms = forms(options.ranks, options.stages)
    rows = measure(options.models, all_forms, options.requests, options.rounds)
    columns = list(rows[0])
    show("Decode steps of ranks", columns, [[row[name] for name in columns] for row in rows])
    write(options.out, "ranks", {"rows": rows})


if __name__ == "__main__":
    main()
