"""Estimates a decode step's time on a GPU from its launches, without a GPU.

    python -m bench.gpu_cost [--out FILE]

The estimate counts the launches of a step with the shape of Llama-3-8B and the bytes that each
reads and writes, and adds fixed costs. The results also have these figures for version 0.2.0, and
each launch's number of programs for the device's SMs. They depend only on the code and on the
host's time in results/gpu_host.json; a test compares.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_bytes import floor_bytes, num_segments, targets, traffic
from bench.gpu_launches import Launch
from bench.gpu_step import Step, Workload, trace
from bench.results import FOLDER, show
from kernels.lora.plan import ROWS_TOKENS

NODE_S = 2e-6
"""Fixed time of a graph's node, in addition to its bytes."""
BYTES_PER_S = 4.3e12
"""An H200's rate of reads; its data sheet has 4.8e12."""
PRODUCT_SHARE = 0.85
"""Share of this rate that a product of matrices reaches."""
NUM_SMS = 132
CTAS_PER_SM = {
    "route_kernel": 32,
    "rank_pairs_kernel": 4,
    "describe_pairs_kernel": 16,
    "plan_items_kernel": 4,
    "experts_linear_kernel": 2,
    "combine_experts_kernel": 21,
    "clamped_swiglu_kernel": 16,
    "add_rms_norm_kernel": 4,
    "norm_rows_kernel": 4,
    "swiglu_kernel": 16,
    "rotary_angles_kernel": 32,
    "store_kernel": 32,
    "decode_kernel": 4,
    "combine_kernel": 12,
    "shrink_kernel": 6,
    "expand_kernel": 5,
}
"""Programs of a decode step's launches that fit an SM at least, from the assembler; a test
compares."""

ROWS = (1, 32, 128)
GOAL, ROWS_WITH_GOAL = 0.75, (1, 32)
"""Goal for steps of the base model, as a share of the floor."""
PRODUCT = "linear"


class Counts(NamedTuple):
    """A step's launches, its products of matrices, and the bytes that they read and write: the
    products, and all launches."""

    nodes: int
    products: int
    product_bytes: int
    all_bytes: int


BEFORE = {
    Workload(1, 0): (Counts(953, 129, 15014038016, 15165581640), 135),
    Workload(1, 1): (Counts(1212, 129, 15014038016, 15256992120), 232),
    Workload(32, 0): (Counts(953, 129, 15160393728, 17964280320), 248),
    Workload(32, 1): (Counts(1212, 129, 15160393728, 18288947200), 369),
    Workload(32, 32): (Counts(1212, 129, 15160393728, 20889415680), 442),
    Workload(128, 0): (Counts(921, 129, 15613624320, 26286507264), 534),
    Workload(128, 1): (Counts(1180, 129, 15613624320, 27333516544), 702),
    Workload(128, 128): (Counts(1180, 129, 15613624320, 37987048704), 1044),
}
"""Version 0.2.0: counts of its code, and the host's microseconds, measured in turns with this
version's (README.md)."""


def workloads() -> Iterator[Workload]:
    for rows in ROWS:
        for adapters in sorted({0, 1, rows}):
            yield Workload(rows, adapters)


def counts_of(step: Step) -> Counts:
    found = [(launch.name, traffic(launch, step).all_bytes) for launch in step.launches]
    products = [num_bytes for name, num_bytes in found if name == PRODUCT]
    return Counts(len(found), len(products), sum(products), sum(each for _, each in found))


def step_s(counts: Counts, host_s: float) -> float:
    """Returns a step's seconds if every node takes its fixed time and then reads its bytes."""
    other_bytes = counts.all_bytes - counts.product_bytes
    products_s = counts.product_bytes / (PRODUCT_SHARE * BYTES_PER_S)
    return host_s + counts.nodes * NODE_S + products_s + other_bytes / BYTES_PER_S


def cost(counts: Counts, host_us: float, floor: int) -> dict[str, Any]:
    """Returns a row of the table. `share_hidden` assumes that the fixed time of products is already
    part of their lower rate."""
    whole_s = step_s(counts, host_us * 1e-6)
    hidden_s = whole_s - counts.products * NODE_S
    floor_s = floor / BYTES_PER_S
    return {
        "nodes": counts.nodes,
        "all_bytes": counts.all_bytes,
        "host_us": round(host_us, 1),
        "step_us": round(whole_s * 1e6, 1),
        "share": round(floor_s / whole_s, 3),
        "share_hidden": round(floor_s / hidden_s, 3),
    }


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


def num_tasks(launch: Launch, step: Step) -> int:
    """Returns the number of programs with work: in attention one for each segment and key head, in
    LoRA the programs of targets that adapters have."""
    a = launch.arguments
    if launch.name == "decode_kernel":
        return num_segments(step) * int(a["NUM_KV_HEADS"])
    if "first_target" in a:
        return num_items(step.work) * math.prod((launch.grid or ())[1:]) * bool(targets(a, step))
    return math.prod(launch.grid or ())


def num_items(work: Workload) -> int:
    """Returns the number of LoRA's items with rows."""
    counts = Counter(row * work.adapters // work.rows for row in range(work.rows))
    return sum(-(-count // ROWS_TOKENS) for count in counts.values()) if work.adapters else 0


def host_times_us(path: Path = FOLDER / "gpu_host.json") -> dict[tuple[int, int], float]:
    """Returns the last measured microseconds, by rows and adapters."""
    found = json.loads(path.read_text())["found"]
    return {(row["rows"], row["adapters"]): row["sum"] for row in found}


def reckon() -> dict[str, Any]:
    """Returns the results as they are written."""
    host_us, costs, programs = host_times_us(), [], []
    for work in workloads():
        step = trace(work)
        floor = floor_bytes(step)
        facts: dict[str, Any] = {"rows": work.rows, "adapters": work.adapters}
        before = cost(*BEFORE[work], floor)
        now = cost(counts_of(step), host_us[work.rows, work.adapters], floor)
        costs.append(
            facts | {"context": work.context, "floor_bytes": floor, "0.2.0": before, "now": now}
        )
        if work.adapters in (0, work.rows):
            programs.append(facts | {"launches": occupancy(step)})
    constants = {
        "node_us": NODE_S * 1e6,
        "bytes_per_s": BYTES_PER_S,
        "product_share": PRODUCT_SHARE,
        "sms": NUM_SMS,
        "ctas_per_sm": CTAS_PER_SM,
    }
    return {"workload": "gpu_cost", "constants": constants, "steps": costs, "programs": programs}


def markdown(found: dict[str, Any]) -> str:
    """Returns the table of README.md."""
    lines = [
        "| rows | adapters | floor, ms | launches | bytes / floor | step, ms | share of floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["steps"]:
        old, now, floor = row["0.2.0"], row["now"], row["floor_bytes"]
        lines.append(
            f"| {row['rows']} | {row['adapters']} | {1e3 * floor / BYTES_PER_S:.2f} "
            f"| {now['nodes']} ({old['nodes']}) "
            f"| {now['all_bytes'] / floor:.3f} ({old['all_bytes'] / floor:.3f}) "
            f"| {now['step_us'] / 1e3:.2f} ({old['step_us'] / 1e3:.2f}) "
            f"| {now['share']:.3f} to {now['share_hidden']:.3f} ({old['share']:.3f}) |"
        )
    return "\n".join(lines)


def print_tables(found: dict[str, Any]) -> None:
    columns = ["rows", "adapters", "floor ms", "nodes", "bytes / floor", "step ms", "share", "goal"]
    for version in ("0.2.0", "now"):
        rows = []
        for row in found["steps"]:
            of, floor = row[version], row["floor_bytes"]
            has_goal = row["adapters"] == 0 and row["rows"] in ROWS_WITH_GOAL
            rows.append(
                [
                    row["rows"],
                    row["adapters"],
                    1e3 * floor / BYTES_PER_S,
                    of["nodes"],
                    f"{of['all_bytes'] / floor:.3f}",
                    of["step_us"] / 1e3,
                    f"{of['share']:.3f} to {of['share_hidden']:.3f}",
                    GOAL if has_goal else None,
                ]
            )
        show(f"a decode step, {version}", columns, rows)
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
