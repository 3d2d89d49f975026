"""W1: output tokens per second of concurrent greedy requests, 64 tokens in, 32 out. Of the real
model, smollm2: chats of 34 to 400 tokens in.

    python -m bench.workloads.throughput [--model bench-200m ...]
        [--systems ours,ours-grpc,vllm,...] [--rounds 5] [--num-out 32] [--requests 16] [--out FILE]

Every system runs in its own process with two threads and times itself. Within a round the systems
take turns, one at a time, with the same prompts, model folder and adapters. The floor and the
hardware's bound (`bench.kernels.roofline`) are measured in every round too. Prefix caches are off,
and no request stops at an end token. Results are medians over the rounds, after a first round to
warm up, and ratios of medians. Several models are measured one after the other, each with its own
floor.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench.kernels.roofline import THREADS, ModelFloor
from bench.machine import best_kernels
from bench.models import RANK, REAL, SHAPES, Prepared, prepare, prompts
from bench.plots import plot_throughput
from bench.results import FOLDER, median, show, write
from bench.systems.child import KINDS, WITHOUT_ADAPTERS, Child
from bench.systems.protocol import Ask, Job, Spec
from bench.workloads.real_model import real_prompts

NUM_IN = 64
MAX_LEN = 512
NUM_ADAPTERS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: `resident` adapters, of which requests use the first `asked` in turn."""

    name: str
    num_requests: int
    asked: int
    resident: int
    only_ours: bool = False


ROWS = (
    Row("base", 16, 0, 0),
    Row("1 adapter", 16, 1, 1),
    Row("4 adapters", 16, 4, 4),
    Row("16 adapters", 16, 16, 16),
    Row("base, 16 adapters idle", 16, 0, 16, only_ours=True),
    Row("4 requests, base", 4, 0, 0),
    Row("4 requests, 4 adapters", 4, 4, 4),
    Row("64 requests, base", 64, 0, 0),
    Row("64 requests, 16 adapters", 64, 16, 16),
)


def runs_row(system: str, row: Row) -> bool:
    return (system.startswith("ours") or not row.only_ours) and (
        system not in WITHOUT_ADAPTERS or not row.asked
    )


def prompts_of(prepared: Prepared, count: int) -> list[list[int]]:
    """Returns prompts of NUM_IN tokens; real ones, of several lengths, for the real model."""
    if prepared.name == REAL:
        return real_prompts(prepared.model_dir, count)
    return prompts(count, NUM_IN, prepared.vocab)


def make_spec(prepared: Prepared, max_sequences: int) -> Spec:
    return Spec(
        model_dir=str(prepared.model_dir),
        base_model=prepared.name,
        adapters={name: str(folder) for name, folder in prepared.adapters.items()},
        max_resident=NUM_ADAPTERS,
        max_rank=RANK,
        max_sequences=max_sequences,
        max_len=MAX_LEN,
        num_threads=THREADS,
    )


def make_job(row: Row, prepared: Prepared, num_out: int) -> Job:
    adapters = [str(i % row.asked) if row.asked else "" for i in range(row.num_requests)]
    found = prompts_of(prepared, row.num_requests)
    return Job([Ask(p, num_out, adapter) for p, adapter in zip(found, adapters, strict=True)])


def measure(
    prepared: Prepared, systems: list[str], rows: list[Row], rounds: int, num_out: int
) -> dict[str, Any]:
    """Returns the rates of each row and system, and of each row's floor."""
    torch.set_num_threads(THREADS)
    floor = ModelFloor(prepared.name)
    rates: dict[str, dict[str, list[float]]] = {row.name: {} for row in rows}
    floors: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = make_spec(prepared, max(row.num_requests for row in rows))
        children = [stack.enter_context(Child(system, spec, logs / system)) for system in systems]
        for round_index in range(rounds + 1):
            measured = floor.measure()
            for row in rows:
                for child in children:
                    if not runs_row(child.name, row):
                        continue
                    child.set_resident([str(i) for i in range(row.resident)])
                    child.wait_for_rest()
                    done = child.run(make_job(row, prepared, num_out))
                    if round_index:
                        rates[row.name].setdefault(child.name, []).append(
                            done.num_tokens / done.seconds
                        )
            if round_index:
                floors.append(measured)
                for row in rows:
                    num_in = round(mean(map(len, prompts_of(prepared, row.num_requests))))
                    work = (row.num_requests, num_in, num_out, row.asked)
                    for kind in ("floor", "bound"):
                        rate = floor.throughput_rate(measured, *work, is_bound=kind == "bound")
                        rates[row.name].setdefault(kind, []).append(rate)
    facts = {child.name: child.facts for child in children}
    return {"tokens_per_second": rates, "floors": floors, "systems": facts}


def summarize(rates: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Returns medians (for vLLM its best configuration's), and our ratios to them."""
    summary: dict[str, dict[str, float]] = {}
    base = median(rates["base"]["ours"]) if "ours" in rates.get("base", {}) else None
    for name, systems in rates.items():
        found = {system: median(values) for system, values in systems.items()}
        vllm = [rate for system, rate in found.items() if system.startswith("vllm")]
        found |= {"vllm best": max(vllm)} if vllm else {}
        if ours := found.get("ours"):
            found |= {
                f"ours / {system}": ours / found[system]
                for system in ("vllm best", "llama-cpp", "peft", "floor", "bound")
                if system in found
            }
            if base and name in {row.name for row in ROWS if row.num_requests == 16}:
                found["ours / our base"] = ours / base
            if "ours-grpc" in found:
                found["gRPC / in-process"] = found["ours-grpc"] / ours
        summary[name] = found
    return summary


def show_tables(summary: dict[str, dict[str, float]], title: str) -> None:
    """Shows rates, then ratios."""
    found = {column: None for row in summary.values() for column in row}
    rates = [column for column in found if " / " not in column]
    ratios = [column for column in found if " / " in column]
    for what, columns in (("output tokens per second", rates), ("ratios", ratios)):
        rows = [[name, *(row.get(column) for column in columns)] for name, row in summary.items()]
        show(f"{title}: {what}", ["", *columns], rows)


def check_comparable(kernels: str, systems: Sequence[str], allow_torch: bool) -> None:
    """Exits with a message if our system would run on a path that is too slow to compare."""
    peers = [system for system in systems if not system.startswith("ours")]
    if peers and kernels == "torch" and not allow_torch:
        raise SystemExit(
            "the native kernels do not run here (is there a compiler?), so our system would use "
            "its slow path. --allow-torch compares anyway, and the result names the kernels"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["bench-200m"])
    parser.add_argument("--systems", default="ours,ours-grpc", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--requests", type=int, nargs="*", help="only rows with this many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-out", type=int, default=32)
    parser.add_argument("--allow-torch", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER / "throughput.json")
    options = parser.parse_args()
    systems = options.systems.split(",")
    check_comparable(best_kernels(), systems, options.allow_torch)
    rows = [row for row in ROWS if not options.requests or row.num_requests in options.requests]
    models: dict[str, dict[str, Any]] = {}
    for model in options.model:
        prepared = prepare(model, NUM_ADAPTERS)
        found = measure(prepared, systems, rows, options.rounds, options.num_out)
        for system in (system for system in systems if system.startswith("ours")):
            check_comparable(found["systems"][system]["kernels"], systems, options.allow_torch)
        summary = summarize(found["tokens_per_second"])
        show_tables(summary, f"W1, {model}, {options.num_out} tokens out")
        models[model] = {"summary": summary, **found}
    workload = {"num_in": NUM_IN, "num_out": options.num_out}
    write(options.out, "W1", {**workload, "models": models})
    summaries = {model: found["summary"] for model, found in models.items()}
    plot_throughput(summaries, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
