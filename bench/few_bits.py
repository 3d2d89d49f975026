"""Measures steps with base weights in few bits against bf16, in turns on one machine.

    python -m bench.few_bits [--model bench-1b] [--requests 1 4 16] [--adapters]
        [--types int4 int8 fp8] [--rounds 20] [--out FILE]

An engine of each type decodes the same requests; every round times one step of each, so that other
work on the machine slows all of them alike. The byte floor is the time of reading all weights of a
step once, at the rate of reads from memory. Prompts are of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from bench.kernels.roofline import DECODE_SIZES, THREADS, read_rate
from bench.models import SHAPES, Prepared, decoder, prepare, prompts
from bench.results import FOLDER, median, show, write
from bench.stepper import Stepper

PLAIN = "none"
TYPES = ("int4", "int8", "fp8")
PROMPT_TOKENS, PROMPT_ROUNDS = 1024, 5
MAX_LEN = 512


def measure(
    prepared: Prepared, requests: int, adapters: int, types: list[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """Returns the seconds of steps by type, with the bytes of the weights that a step reads."""
    steppers = {
        kind: Stepper(prepared, adapters, requests, quantize=kind, max_len=MAX_LEN)
        for kind in (PLAIN, *types)
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for kind, stepper in steppers.items():
            began_s = time.perf_counter()
            stepper.step()
            seconds[kind].append(time.perf_counter() - began_s)
    found: dict[str, dict[str, Any]] = {}
    for kind, stepper in steppers.items():
        # A step reads a row of the embedding for each token, and everything else once.
        backend = stepper.built.engine.runner.backend
        found[kind] = {"seconds": median(seconds[kind]), "weights_bytes": backend.weights_bytes}
        stepper.close()
    return found


def measure_prompts(prepared: Prepared, types: list[str]) -> dict[str, float]:
    """Returns the seconds of a prompt by type."""
    steppers = {
        kind: Stepper(prepared, 0, 1, quantize=kind, max_len=PROMPT_TOKENS + 64)
        for kind in (PLAIN, *types)
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for prompt in prompts(PROMPT_ROUNDS, PROMPT_TOKENS, prepared.vocab):
        for kind, stepper in steppers.items():
            seconds[kind].append(stepper.time_prompt(prompt))
    for stepper in steppers.values():
        stepper.close()
    return {kind: median(values) for kind, values in seconds.items()}


def rows_of(found: dict[str, dict[str, Any]], requests: int, rate: float) -> list[dict[str, Any]]:
    plain = found[PLAIN]
    return [
        {
            "requests": requests,
            "type": "bf16" if kind == PLAIN else kind,
            "ms": 1e3 * one["seconds"],
            "speed by bf16's": plain["seconds"] / one["seconds"],
            "byte floor by time": one["read_bytes"] / rate / one["seconds"],
        }
        for kind, one in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-1b")
    parser.add_argument("--requests", type=int, nargs="+", choices=DECODE_SIZES, default=[1, 4, 16])
    parser.add_argument("--adapters", action="store_true", help="each request has its own")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", action="store_true", help="measure prompts, too")
    parser.add_argument("--out", type=Path, default=FOLDER / "few_bits.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rate, rows = read_rate(9), []
    for requests in options.requests:
        prepared = prepare(options.model, requests)
        adapters = requests if options.adapters else 0
        found = measure(prepared, requests, adapters, options.types, options.rounds)
        embedding_bytes = 2 * prepared.vocab * decoder(options.model).hidden_size
        for one in found.values():
            one["read_bytes"] = one["weights_bytes"] - embedding_bytes
        rows += rows_of(found, requests, rate)
    columns = list(rows[0])
    show("Decode steps", columns, [[row[name] for name in columns] for row in rows])
    result: dict[str, Any] = {"model": options.model, "adapters": options.adapters}
    result |= {"read_bytes_per_second": rate, "rows": rows}
    if options.prompts:
        seconds = measure_prompts(prepare(options.model, 1), options.types)
        speed = [(kind, 1e3 * s, seconds[PLAIN] / s) for kind, s in seconds.items()]
        show(f"Prompts of {PROMPT_TOKENS} tokens", ("type", "ms", "speed by bf16's"), speed)
        result["prompt_seconds"] = seconds
    write(options.out, "few bits", result)


if __name__ == "__main__":
    main()
