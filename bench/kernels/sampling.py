"""Times the choice of tokens from logits on the CPU: native against its definition in torch.

    python -m bench.kernels.sampling [--vocab 49152 151936] [--rows 1 16] [--rounds 9] [--out FILE]

The logits are peaked as a language model's are: each row's probabilities fall by a power of the
token's rank. Both take turns; times are medians.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels.roofline import THREADS
from bench.results import FOLDER, median, show, write
from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.compute.sampler import Sampler
from kernels.native.library import load

PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
POWER = 1.5
REPEATS = 10


def peaked(rows: int, vocab: int) -> torch.Tensor:
    """Returns logits fp32 [rows, vocab] whose probabilities fall by a power of the rank."""
    generator = torch.Generator().manual_seed(rows)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)]) + 1
    return -POWER * ranks.float().log()


def measure(vocabs: list[int], row_counts: list[int], rounds: int) -> list[dict[str, Any]]:
    library = load()
    assert library is not None, "no native kernels are for this processor"
    results = []
    for vocab in vocabs:
        for count in row_counts:
            logits = peaked(count, vocab)
            for name, params in PARAMS.items():
                rows: list[Sequence | None] = [_sequence(seed, params) for seed in range(count)]
                works = {"torch": Sampler([0]), "native": Sampler([0], library=library)}
                times: defaultdict[str, list[float]] = defaultdict(list)
                for _ in range(rounds):
                    for side, sampler in works.items():
                        times[side].append(_seconds(partial(sampler.sample, logits, rows)))
                by_torch, native = (1e3 * median(times[side]) for side in works)
                row = {"vocab": vocab, "rows": count, "sampling": name}
                row |= {"torch_ms": by_torch, "native_ms": native, "speed": by_torch / native}
                results.append(row)
    return results


def _sequence(seed: int, params: dict[str, Any]) -> Sequence:
    return Sequence(Request(str(seed), (1, 2), SamplingParams(seed=seed, **params)))


def _seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return (time.perf_counter() - began_s) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=FOLDER / "sampling.json")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows = measure(arguments.vocab, arguments.rows, arguments.rounds)
    columns = list(rows[0])
    show("Choice of tokens", columns, [[row[name] for name in columns] for row in rows])
    write(arguments.out, "sampling", {"rows": rows})


if __name__ == "__main__":
    main()
