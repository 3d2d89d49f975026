"""Predicts decode steps on an H200 without a GPU, and compares them with measured steps.

    python -m bench.gpu_model.cost [--out FILE]

A prediction traces a step with the shape of Llama-3-8B (`gpu_step`), and adds the times of its
launches (`gpu_time`) to the host's measured time. results/h200/steps.json has the measured steps:
with adapters beside the base's products, and in line with them. The results also have each launch's
number of programs for the device's SMs. They depend only on the code and on the measured steps; a
test compares.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_model import time as gpu_time
from bench.gpu_model.bytes import floor_bytes, traffic
from bench.gpu_model.launches import COMPUTE, Launch
from bench.gpu_model.step import Step, Workload, trace
from bench.gpu_model.time import BYTES_PER_S, CTAS_PER_SM, NUM_SMS, device_s, num_tasks
from bench.results import FOLDER, show
from kernels import tuning

MEASURED = Path("h200/steps.json")
ROWS, CONTEXT = (1, 32, 128), 512
MOST_ADDED = 0.05
"""Goal: adapters add their bytes, and this share of the step without adapters."""
CONSTANTS = (
    *("BYTES_PER_S", "FLOP_PER_S", "NODE_S", "EXPOSED_SHARE", "SHRINK_BYTES_PER_S", "BLOCK_S"),
    *("WAVE_S", "MOST_WAVES", "KERNEL_S", "PRODUCT_S", "CONTEXT_BYTES_PER_S"),
    *("BETWEEN_BYTES_PER_S", "EMPTY_PROGRAM_S", "FORK_S", "NUM_SMS", "CTAS_PER_SM"),
)
Found = dict[str, Any]


class Counts(NamedTuple):
    """The launches of a step's critical path and beside it, and the bytes that all launches read
    and write."""

    nodes: int
    beside: int
    all_bytes: int


def workloads() -> Iterator[Workload]:
    for rows in ROWS:
        for adapters in sorted({0, 1, rows}):
            yield Workload(rows, adapters, CONTEXT)


def measured(path: Path = FOLDER / MEASURED) -> Found:
    """Returns measured steps, and kernels measured apart."""
    found: Found = json.loads(path.read_text())
    return found


@cache
def step_of(work: Workload) -> Step:
    """Traces a step once: many results are of the same ones."""
    return trace(work)


@cache
def step_in_line(work: Workload) -> Step:
    """Traces a step in which LoRA is in line with the products, as if there were no side stream."""
    with tuning.overridden("beside", most_rows=0):
        return trace(work)


def counts_of(step: Step) -> Counts:
    num_critical = sum(launch.stream == COMPUTE for launch in step.launches)
    all_bytes = sum(traffic(launch, step).all_bytes for launch in step.launches)
    return Counts(num_critical, len(step.launches) - num_critical, all_bytes)


def compare(case: Found, is_in_line: bool = False) -> Found:
    """Predicts a measured step. `error` is a share of the measured time."""
    work = Workload(case["num_rows"], case["num_adapters"], case["context"])
    step = step_in_line(work) if is_in_line else step_of(work)
    device_ms, floor = 1e3 * device_s(step), floor_bytes(step)
    predicted_ms = case["host_ms"] + device_ms
    return {
        "rows": work.rows,
        "adapters": work.adapters,
        "context": work.context,
        **counts_of(step)._asdict(),
        "floor_bytes": floor,
        "floor_ms": round(1e3 * floor / BYTES_PER_S, 3),
        "host_ms": case["host_ms"],
        "measured_ms": case["step_ms"],
        "predicted_ms": round(predicted_ms, 3),
        "error": round(predicted_ms / case["step_ms"] - 1, 4),
        "share": round(1e3 * floor / BYTES_PER_S / predicted_ms, 3),
    }


def adapters_cost(steps: list[Found], adapter_bytes: int) -> list[Found]:
    """Returns for each step with adapters its limit, and the share of the step without adapters
    that they add beyond their bytes, measured and predicted."""
    base = {(row["rows"], row["context"]): row for row in steps if not row["adapters"]}
    found = []
    for row in steps:
        alone = base[row["rows"], row["context"]]
        if not row["adapters"] or row["context"] != CONTEXT:
            continue
        bytes_ms = 1e3 * row["adapters"] * adapter_bytes / BYTES_PER_S
        cost: Found = {"rows": row["rows"], "adapters": row["adapters"]}
        for source in ("measured", "predicted"):
            alone_ms, step_ms = alone[f"{source}_ms"], row[f"{source}_ms"]
            cost[source] = {
                "base_ms": round(alone_ms, 4),
                "limit_ms": round((1 + MOST_ADDED) * alone_ms + bytes_ms, 4),
                "step_ms": round(step_ms, 4),
                "added": round((step_ms - bytes_ms) / alone_ms - 1, 4),
            }
        found.append(cost)
    return found


def label(launch: Launch, step: Step) -> str:
    """Returns the kernel's name, with the group if it computes LoRA."""
    first = launch.arguments.get("first_target")
    return launch.name if first is None else f"{launch.name} {step.groups[first]}"


def occupancy(step: Step) -> dict[str, dict[str, float]]:
    """Returns for each kind of our launches their number, programs and tasks, and the times that
    the tasks fill the device."""
    found: dict[str, dict[str, float]] = {}
    for launch in step.launches:
        if launch.grid is not None:
            name, tasks = label(launch, step), num_tasks(launch, step)
            count = found[name]["launches"] + 1 if name in found else 1
            found[name] = {
                "launches": count,
                "programs": math.prod(launch.grid),
                "tasks": tasks,
                "waves": round(tasks / (CTAS_PER_SM[launch.name] * NUM_SMS), 2),
            }
    return found


def reckon() -> Found:
    """Returns the results as they are written."""
    cases = measured()
    steps = [compare(case) for case in cases["steps"]]
    programs = [
        {
            "rows": work.rows,
            "adapters": work.adapters,
            "launches": occupancy(step_of(work)),
        }
        for work in workloads()
        if work.adapters in (0, work.rows)
    ]
    return {
        "workload": "gpu_cost",
        "constants": {name.lower(): getattr(gpu_time, name) for name in CONSTANTS},
        "steps": steps,
        "loop": [compare(case) for case in cases["loop"]],
        "in_line": [compare(case, is_in_line=True) for case in cases["in_line"]["steps"]],
        "adapters": adapters_cost(steps, cases["adapter_bytes"]),
        "programs": programs,
    }


def markdown(found: Found) -> str:
    """Returns the tables of README.md."""
    in_line = {(row["rows"], row["adapters"], row["context"]): row for row in found["in_line"]}
    lines = [
        "| rows | adapters | floor, ms | launches | bytes / floor | step, ms | in line, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found["steps"], key=lambda row: (row["rows"], row["adapters"])):
        if row["context"] == CONTEXT:
            other = in_line[row["rows"], row["adapters"], CONTEXT]
            beside = f" + {row['beside']}" if row["beside"] else ""
            lines.append(
                f"| {row['rows']} | {row['adapters']} | {row['floor_ms']:.2f} "
                f"| {row['nodes']}{beside} | {row['all_bytes'] / row['floor_bytes']:.3f} "
                f"| {row['measured_ms']:.2f} ({row['predicted_ms']:.2f}) "
                f"| {other['measured_ms']:.2f} ({other['predicted_ms']:.2f}) |"
            )
    lines += [
        "",
        "| rows | adapters | base, ms | limit, ms | step, ms | added | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found["adapters"], key=lambda row: (row["rows"], row["adapters"])):
        of = row["measured"]
        lines.append(
            f"| {row['rows']} | {row['adapters']} | {of['base_ms']:.2f} | {of['limit_ms']:.2f} "
            f"| {of['step_ms']:.2f} | {100 * of['added']:.1f} % "
            f"| {100 * row['predicted']['added']:.1f} % |"
        )
    return "\n".join(lines)


def print_tables(found: Found) -> None:
    columns = ["rows", "adapters", "context", "launches", "beside", "host ms", "measured ms"]
    columns += ["predicted ms", "error, %", "share of floor"]
    for part in ("steps", "loop", "in_line"):
        rows = [
            [
                *(row["rows"], row["adapters"], row["context"], row["nodes"], row["beside"]),
                *(row["host_ms"], row["measured_ms"], row["predicted_ms"]),
                *(f"{100 * row['error']:+.1f}", f"{row['share']:.3f}"),
            ]
            for row in found[part]
        ]
        show(f"decode, {part.replace('_', ' ')}", columns, rows)
    columns = ["rows", "adapters", "base ms", "limit ms", "step ms", f"added, {MOST_ADDED:.0%}"]
    for source in ("measured", "predicted"):
        rows = []
        for row in found["adapters"]:
            *times_ms, added = row[source].values()
            rows.append([row["rows"], row["adapters"], *times_ms, f"{added:.1%}"])
        show(f"adapters, {source}", columns, rows)
    for row in found["programs"]:
        title = f"programs, {row['rows']} rows, {row['adapters']} adapters"
        facts = [[name, *each.values()] for name, each in row["launches"].items()]
        show(title, ["kernel", "launches", "programs", "tasks", "waves"], facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu_cost.json")
    options = parser.parse_args()
    found = reckon()
    print_tables(found)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {options.out}; README.md shows:\n{markdown(found)}")


if __name__ == "__main__":
    main()
