"""Measures decode steps of a model that several processes compute together, on this machine.

    python -m bench.ranks [--models bench-tiny bench-200m] [--ranks 1 2 4] [--requests 1 16]
        [--rounds 5] [--out FILE]

Every round makes an engine of each number of ranks, which share all cores, and one with a single
thread, and times some of its steps: other work on the machine slows all of them alike. A step's
exchanges include the time in which rank 0 waits for the others. Adapters are not used.
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


class Form(NamedTuple):
    """How an engine computes."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks} x {self.threads}"


class Sample(NamedTuple):
    """The seconds of a step, and of its exchanges."""

    step_s: float
    exchange_s: float


def forms(ranks: list[int]) -> list[Form]:
    """Returns the forms: each number of ranks with an equal part of the cores, and one thread."""
    made = [Form(count, max(1, THREADS // count)) for count in ranks]
    return list(dict.fromkeys((Form(1, 1), *made)))


def sample(prepared: Prepared, form: Form, requests: int) -> Sample:
    """Measures steps of an engine; returns the medians of a step's seconds, and the mean of its
    exchanges'."""
    stepper = Stepper(
        prepared, 0, requests, num_threads=form.threads, num_ranks=form.ranks, max_len=1024
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


def measure(models: list[str], ranks: list[int], requests: list[int], rounds: int) -> list[Any]:
    """Returns a row for each model, number of requests, and form."""
    samples: defaultdict[tuple[str, int, Form], list[Sample]] = defaultdict(list)
    for _ in range(rounds):
        for model in models:
            for count in requests:
                for form in forms(ranks):
                    found = sample(prepare(model, 1), form, count)
                    samples[model, count, form].append(found)
    return [
        {
            "model": model,
            "requests": count,
            "ranks x threads": str(form),
            "step_ms": 1e3 * median([each.step_s for each in found]),
            "exchanges_ms": 1e3 * median([each.exchange_s for each in found]),
        }
        for (model, count, form), found in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["bench-tiny", "bench-200m"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, nargs="+", choices=DECODE_SIZES, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "ranks.json")
    options = parser.parse_args()
    rows = measure(options.models, options.ranks, options.requests, options.rounds)
    columns = list(rows[0])
    show("Decode steps of ranks", columns, [[row[name] for name in columns] for row in rows])
    write(options.out, "ranks", {"rows": rows})


if __name__ == "__main__":
    main()
