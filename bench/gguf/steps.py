"""Compares decode steps with llama.cpp's, on the same GGUF file, in turns on one machine.

    python -m bench.peers.install llama-cpp
    python -m bench.gguf.steps [--model smollm2 bench-1b] [--requests 1 4 16] [--rounds 9]
        [--steps 8] [--adapter-type F16] [--out FILE]
    python -m bench.gguf.steps --threads 1 --clock processor  # while the machine is not quiet

Both systems decode the same requests, greedily, in processes of their own with two threads, ours by
the engine's steps with scheduler and sampler, llama.cpp by `llama_decode` and the largest logits.
Requests are of the base model, all of one adapter, or each of its own adapter. llama.cpp applies an
adapter to a whole batch, so each request of its own adapter is a batch there: in one context whose
adapter changes, or, which takes more memory, in a context for each adapter. The faster one counts.
In every round the systems take some steps of each case. Results are medians over all steps.

Before that, both have to compute the same. Ours generates tokens, and llama.cpp chooses the next
token in each place of them, with the same adapter and without. It multiplies with inputs rounded to
8 bits, so near ties come out differently. The random adapters have a large alpha, so that they
change many tokens: 64, and 256 for smollm2.

smollm2 is the real file of SmolLM2-135M-Instruct, with 4 bits (Q4_1), and random adapters. The
other models are random weights in Q4_0, embedding and head in Q8_0.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gguf.files import ADAPTER_KIND, write_adapter, write_model
from bench.kernels.roofline import THREADS
from bench.machine import best_kernels
from bench.models import RANK, REAL, ROOT, SHAPES, Prepared, prepare, prepare_adapter, prompts
from bench.results import FOLDER, median, show, write
from bench.systems.child import STEP_KINDS, StepChild
from bench.systems.protocol import CLOCKS, Ask, Job, Spec
from bench.workloads.throughput import check_comparable
from inference_svc.model.gguf.expand import expanded
from loadout.demo.chat.model import model_file

OURS = "ours"
MODELS = (REAL, "bench-1b", "bench-200m", "bench-tiny")
NUM_IN, MAX_LEN = 64, 512
MAX_STEPS = MAX_LEN - NUM_IN - 32
"""Steps of a case that leave room for those before the measurement."""
GOALS = {1: 1.0, 4: 1.2}
"""Our speed by llama.cpp's, by requests, with the base model or one adapter."""
GOAL_OF_SEVERAL = 2.0
ALPHA, ALPHA_OF_REAL = 64, 256
CHECKED_REQUESTS, CHECKED_STEPS = 4, 24
MIN_AGREEMENT, MIN_ADVANTAGE = 0.8, 0.1
"""The least share of tokens that both choose, and its distance from that without the adapters."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that decode at once, of `adapters` in turn; 0 is the base model."""

    requests: int
    adapters: int

    @property
    def name(self) -> str:
        return {0: "base", 1: "one adapter"}.get(self.adapters, "an adapter each")

    @property
    def goal(self) -> float | None:
        return GOAL_OF_SEVERAL if self.adapters > 1 else GOALS.get(self.requests)

    def job(self, vocab: int) -> Job:
        found = prompts(self.requests, NUM_IN, vocab)
        count = self.adapters
        names = [str(index % count) if count else "" for index in range(self.requests)]
        return Job([Ask(p, MAX_LEN, name) for p, name in zip(found, names, strict=True)])


def cases_of(requests: Sequence[int]) -> list[Case]:
    return [Case(count, adapters) for count in requests for adapters in sorted({0, 1, count})]


def make_spec(name: str, requests: int, num_adapters: int, kind: str, root: Path = ROOT) -> Spec:
    """Makes a model's file, its adapters as folders and as files, where they are missing."""
    folder = (root / "gguf" / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = _model_file(name, folder, root)
    adapters, loras = {}, {}
    with expanded(path, has_tokenizer=False) as model_dir:
        prepared = Prepared(name, model_dir, {})
        config = SHAPES[name].make_config()
        for index in range(num_adapters):
            adapter = folder / f"adapter-{index}"
            prepare_adapter(
                prepared, adapter, index, lora_alpha=ALPHA_OF_REAL if name == REAL else ALPHA
            )
            lora = folder / f"adapter-{index}.{kind}.gguf"
            if not lora.is_file():
                partial = lora.with_suffix(".partial")
                write_adapter(adapter, config, partial, kind)
                partial.rename(lora)
            adapters[str(index)], loras[str(index)] = str(adapter), str(lora)
    return Spec(
        model_dir=str(folder),
        base_model=name,
        adapters=adapters,
        max_resident=num_adapters,
        max_rank=RANK,
        max_sequences=requests,
        max_len=MAX_LEN,
        num_threads=THREADS,
        options={"gguf": str(path), "loras": loras},
    )


def _model_file(name: str, folder: Path, root: Path) -> Path:
    """Returns a model's file, which is made or downloaded if it is missing."""
    if name == REAL:
        return model_file(root).resolve()
    path = folder / f"{name}.Q4_0.gguf"
    if not path.is_file():
        partial = path.with_suffix(".partial")
        write_model(prepare(name, 0, root), partial)
        partial.rename(path)
    return path


def check_agreement(ours: StepChild, theirs: StepChild, case: Case, vocab: int) -> dict[str, Any]:
    """Returns the share of our tokens that llama.cpp chooses, too, with the same adapters and
    without, and how many tokens of each request are equal until the first other one.

    Exits with a message if the two do not compute the same.
    """
    job = case.job(vocab)
    ours.start(job)
    ours.step(CHECKED_STEPS)
    outputs = ours.outputs()
    chosen = theirs.choices(job, outputs)
    result: dict[str, Any] = {
        "system": theirs.name,
        "case": case.name,
        "agreement": _agreement(outputs, chosen),
        "equal until": [_num_equal(*pair) for pair in zip(outputs, chosen, strict=True)],
        "tokens": len(outputs[0]),
    }
    if case.adapters:
        plain = Job([Ask(ask.prompt, ask.max_tokens) for ask in job.asks])
        result["agreement without"] = _agreement(outputs, theirs.choices(plain, outputs))
    found, without = result["agreement"], result.get("agreement without", 0.0)
    if found < max(MIN_AGREEMENT, without + MIN_ADVANTAGE):
        raise SystemExit(f"{theirs.name} computes something else: {result}")
    return result


def _agreement(outputs: list[list[int]], chosen: list[list[int]]) -> float:
    pairs = [
        one == other
        for output, choices in zip(outputs, chosen, strict=True)
        for one, other in zip(output, choices, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _num_equal(output: list[int], choices: list[int]) -> int:
    places = (i for i, (a, b) in enumerate(zip(output, choices, strict=True)) if a != b)
    return next(places, len(output))


def measure_case(
    children: Sequence[StepChild], case: Case, vocab: int, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Returns the seconds of each step by system, in turns; the order changes with every round."""
    seconds: dict[str, list[float]] = {child.name: [] for child in children}
    for child in children:
        child.start(case.job(vocab))
        child.wait_for_rest()
    for index in range(rounds):
        for child in children if index % 2 else children[::-1]:
            seconds[child.name] += child.step(steps)
    return seconds


def row_of(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the row of a case: medians in milliseconds, and our speed by llama.cpp's best."""
    found = {name: median(values) for name, values in seconds.items()}
    best = min(value for name, value in found.items() if name != OURS)
    row: dict[str, Any] = {"requests": case.requests, "of": case.name}
    row |= {f"{name}, ms": 1e3 * found[name] if name in found else None for name in STEP_KINDS}
    return row | {"ours / llama.cpp": best / found[OURS], "goal": case.goal, "all": seconds}


def measure(name: str, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the rows of a model's table, and the agreement of both systems."""
    count = max(case.adapters for case in cases)
    requests = max(CHECKED_REQUESTS, *(case.requests for case in cases))
    spec = make_spec(name, requests, max(count, 1), options.adapter_type)
    spec.options["clock"] = options.clock
    spec = replace(spec, num_threads=options.threads)
    vocab: int = SHAPES[name].values["vocab_size"]
    rows = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = [stack.enter_context(StepChild(kind, spec, logs / kind)) for kind in STEP_KINDS]
        checks = [
            check_agreement(children[0], theirs, Case(CHECKED_REQUESTS, adapters), vocab)
            for adapters in sorted({0, 1, min(max(count, 1), CHECKED_REQUESTS)})
            for theirs in children[1:]
        ]
        for case in cases:
            compared = children if case.adapters > 1 else children[:-1]
            seconds = measure_case(compared, case, vocab, options.rounds, options.steps)
            rows.append({"model": name, **row_of(case, seconds)})
            ratio = f"{rows[-1]['ours / llama.cpp']:.2f} of llama.cpp's speed"
            print(f"{name}, {case.requests} requests, {case.name}: {ratio}", flush=True)
    facts = {child.name: child.facts for child in children}
    file = Path(spec.options["gguf"]).name
    return {"rows": rows, "checks": checks, "systems": facts, "file": file}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[REAL, "bench-1b"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="of each system in a round")
    parser.add_argument("--adapter-type", choices=("F16", "F32"), default=ADAPTER_KIND)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--allow-torch", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER / "gguf_steps.json")
    options = parser.parse_args()
    if not 0 < options.rounds * options.steps <= MAX_STEPS:
        parser.error(f"--rounds times --steps must be from 1 to {MAX_STEPS}")
    check_comparable(best_kernels(), list(STEP_KINDS), options.allow_torch)
    models = {name: measure(name, cases_of(options.requests), options) for name in options.model}
    rows = [row for found in models.values() for row in found["rows"]]
    columns = [column for column in rows[0] if column != "all"]
    show("Decode steps", columns, [[row[column] for column in columns] for row in rows])
    checks = [[name, *each.values()] for name, found in models.items() for each in found["checks"]]
    show(
        "Tokens that both choose",
        ["model", "system", "of", "share", "first", "of", "without"],
        checks,
    )
    workload = {"num_in": NUM_IN, "rank": RANK, "adapter_type": options.adapter_type}
    workload |= {"threads": options.threads, "clock": options.clock}
    write(options.out, "decode steps of a GGUF file", workload | {"models": models})


if __name__ == "__main__":
    main()
