"""Predicts decode steps of models that several GPUs share (tensor parallelism), without a GPU.

    python -m bench.gpu_model.ranks [--out FILE]

A prediction traces the step of the first rank, which has the embedding's first rows, and adds the
time of its launches (`gpu_time`), its sums over ranks, and the host's time. The host's time is the
measured one of Llama-3-8B on one H200 for as many rows. **Exchanges are not measured by us**: their
constants are others' published measurements of NCCL on NVLink, so that the results are plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_model.bytes import floor_bytes
from bench.gpu_model.cost import CONTEXT, MEASURED, counts_of, measured
from bench.gpu_model.step import Step, Workload, trace
from bench.gpu_model.time import BYTES_PER_S, device_s
from bench.results import FOLDER, show
from tools.sizing_models import MODELS

LATENCY_S = {2: 6e-6, 4: 9e-6, 8: 15e-6}
"""A sum of at most some kilobytes as a node of a graph, by the number of GPUs. Sources: 6 us on two
H100 (github.com/NVIDIA/nccl/issues/1259), 15 us on eight (6 to 17 us in
github.com/pytorch/pytorch/issues/131739); between them for four."""
WIRE_BYTES_PER_S = 370e9
"""The rate of one GPU's NVLink for large rings on H100. Source:
github.com/NVIDIA/nccl-tests/issues/212."""
RANKS = {"Llama-3.1-8B": (1, 2, 4, 8), "Llama-3.3-70B": (2, 4, 8)}
ROWS = (1, 32)
Found = dict[str, Any]


def sum_s(num_bytes: int, num_ranks: int) -> float:
    """Returns the seconds of a sum: a ring sends 2 (n - 1) / n of the bytes."""
    return LATENCY_S[num_ranks] + 2 * (num_ranks - 1) / num_ranks * num_bytes / WIRE_BYTES_PER_S


def columns_s(num_bytes: int, num_ranks: int) -> float:
    """Returns the seconds until each rank has the columns of all: (n - 1) / n of the bytes."""
    return LATENCY_S[num_ranks] + (num_ranks - 1) / num_ranks * num_bytes / WIRE_BYTES_PER_S


def exchanges_s(step: Step, num_ranks: int) -> float:
    """Returns the seconds of all exchanges of a step."""
    sums = sum(sum_s(each, num_ranks) for each in step.sums)
    return sums + sum(columns_s(each, num_ranks) for each in step.columns)


def predict(model: str, num_ranks: int, work: Workload, host_ms: float) -> Found:
    """Predicts a rank's step."""
    step = trace(work, MODELS[model], num_ranks)
    floor_ms, device_ms = 1e3 * floor_bytes(step) / BYTES_PER_S, 1e3 * device_s(step)
    exchanges_ms = 1e3 * exchanges_s(step, num_ranks)
    counts = counts_of(step)
    return {
        "model": model,
        "ranks": num_ranks,
        "rows": work.rows,
        "adapters": work.adapters,
        "floor_ms": round(floor_ms, 3),
        "launches": counts.nodes,
        "launches_beside": counts.beside,
        "exchanges": len(step.sums) + len(step.columns),
        "exchanged_bytes": sum(step.sums) + sum(step.columns),
        "exchanges_ms": round(exchanges_ms, 3),
        "device_ms": round(device_ms, 3),
        "host_ms": host_ms,
        "step_ms": round(host_ms + device_ms + exchanges_ms, 3),
    }


def cases() -> Iterator[tuple[str, int, Workload, float]]:
    """Yields models, ranks and workloads, with the time on the host."""
    host_ms = {
        (case["num_rows"], case["num_adapters"]): case["host_ms"]
        for case in measured(FOLDER / MEASURED)["steps"]
        if case["context"] == CONTEXT
    }
    for model, counts in RANKS.items():
        for num_ranks in counts:
            for rows in ROWS:
                for adapters in (0, rows):
                    work = Workload(rows, adapters, CONTEXT)
                    yield model, num_ranks, work, host_ms[rows, adapters]


def reckon() -> Found:
    """Returns the results as they are written."""
    constants = {
        "latency_us": {str(count): 1e6 * each for count, each in LATENCY_S.items()},
        "wire_bytes_per_s": WIRE_BYTES_PER_S,
    }
    steps = [predict(*case) for case in cases()]
    return {"workload": "gpu_ranks", "constants": constants, "steps": steps}


def markdown(found: Found) -> str:
    """Returns the table of README.md."""
    lines = [
        "| model | GPUs | rows | adapters | floor, ms | launches | sums | sums, ms | step, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["steps"]:
        beside = f" + {row['launches_beside']}" if row["launches_beside"] else ""
        lines.append(
            f"| {row['model']} | {row['ranks']} | {row['rows']} | {row['adapters']} "
            f"| {row['floor_ms']:.2f} | {row['launches']}{beside} | {row['exchanges']} "
            f"| {row['exchanges_ms']:.2f} | {row['step_ms']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu_ranks.json")
    options = parser.parse_args()
    found = reckon()
    columns = list(found["steps"][0])
    show("decode on ranks", columns, [list(row.values()) for row in found["steps"]])
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {options.out}; README.md shows:\n{markdown(found)}")


if __name__ == "__main__":
    main()
