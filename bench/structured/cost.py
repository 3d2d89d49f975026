"""Measures decode steps of requests whose answers have a form against steps of the same requests
without one.

    python -m bench.structured.cost [--model smollm2] [--requests 16] [--rounds 7] [--steps 100]
        [--out FILE]

In each round the same engine computes plain requests, structured ones, and plain ones again: the
ratio of the two plain ones is noise, and on a busy machine the ratio of the fastest tenths tells
more than the ratio of medians. `masks_ms` and `thread_ms` are the processor time a step of the
process that computes masks, and of the engine's threads that talk to it: others disturb these
least. SmolLM2's vocabulary has 49,152 tokens. The schema is a list
of objects as agents send them, which never ends.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.kernels.roofline import THREADS
from bench.models import REAL, prepare, prompts
from bench.results import FOLDER, median, percentile, show, write
from bench.stepper import NUM_IN, Stepper
from inference_svc.engine.transport.messages import SetVocabulary
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import make_vocabulary
from inference_svc.text.tokenizer import Tokenizer

NUM_STEPS = 100
STEP = {
    "type": "object",
    "properties": {
        "explanation": {"type": "string"},
        "tool": {"enum": ["search", "open", "calculate"]},
        "count": {"type": "integer"},
        "score": {"type": "number"},
    },
    "required": ["explanation", "tool", "count", "score"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": STEP, "minItems": 10_000}
FORMS = ("plain", "structured", "plain again")


def measure(model: str, num_requests: int, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Returns the medians of a step's milliseconds, by form."""
    prepared = prepare(model, 1)
    stepper = Stepper(prepared, 0, num_requests, num_threads=THREADS, max_len=1024)
    text = Tokenizer(prepared.model_dir)
    decoder = stepper.built.decoder
    vocabulary = make_vocabulary(text.pieces, decoder.vocab_size, decoder.eos_token_ids)
    stepper.send(SetVocabulary(vocabulary))
    asks = [(each, "") for each in prompts(num_requests, NUM_IN, prepared.vocab)]
    grammar = Grammar.json_schema(SCHEMA)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    spent: defaultdict[str, list[list[float]]] = defaultdict(list)
    counts = stepper.built.engine.masks.counts
    try:
        for _ in range(rounds):
            for form in FORMS:
                is_structured = form == "structured"
                stepper.start(asks, grammar if is_structured else None, temperature=1.0)
                before = _lane_seconds(stepper)
                for _ in range(num_steps):
                    began_s = time.perf_counter()
                    stepper.step()
                    seconds[form].append(time.perf_counter() - began_s)
                after = _lane_seconds(stepper)
                spent[form].append(
                    [(end - start) / num_steps for start, end in zip(before, after, strict=True)]
                )
        plain = seconds["plain"] + seconds["plain again"]
        plain_s, fastest_s = median(plain), percentile(plain, 10)
        return [
            {
                "form": form,
                "step_ms": 1e3 * median(found),
                "ratio": median(found) / plain_s,
                "fastest_ratio": percentile(found, 10) / fastest_s,
                "mask_us": 1e6 * counts.mask_s / max(1, counts.num_masks),
                "masks_ms": 1e3 * median([each[0] for each in spent[form]]),
                "thread_ms": 1e3 * median([each[1] for each in spent[form]]),
                "late": counts.num_late,
            }
            for form, found in seconds.items()
        ]
    finally:
        stepper.close()


def _lane_seconds(stepper: Stepper) -> tuple[float, float]:
    """Returns the processor time until now of the processes that compute masks, and of the threads
    that talk to them."""
    lanes = stepper.built.engine.masks.lanes
    tasks = [Path(f"/proc/{lane.process_id}/task") for lane in lanes if lane.process_id]
    processes = [each / "schedstat" for task in tasks for each in task.iterdir()]
    threads = [
        Path(f"/proc/self/task/{thread.native_id}/schedstat")
        for thread in threading.enumerate()
        if thread.name.endswith("masks")
    ]
    return _run_seconds(processes), _run_seconds(threads)


def _run_seconds(files: list[Path]) -> float:
    return sum(1e-9 * int(each.read_text().split()[0]) for each in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each form in a round")
    parser.add_argument("--out", type=Path, default=FOLDER / "structured.json")
    arguments = parser.parse_args()
    rows = measure(arguments.model, arguments.requests, arguments.rounds, arguments.steps)
    columns = list(rows[0])
    show("Decode steps", columns, [[row[name] for name in columns] for row in rows])
    write(arguments.out, "structured", {"rows": rows})


if __name__ == "__main__":
    main()
