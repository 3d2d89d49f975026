"""Compares each goal with its measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MIN_RATIO, MIN_SHARE_OF_BOUND, NEVER_BELOW = 1.3, 0.85, 1.0
"""Goals of kernels: speed in units of the better tuned peer's, or share of the device's limit."""
MIN_SHARE_OF_FLOOR, MIN_SHARE_OF_BUS, MAX_P99_RATIO = 0.75, 0.8, 1.1
MIN_SHARE_OF_BASE = 0.9
"""Goal of the services: their tokens/s with many resident adapters, relative to none."""
MIN_SHARE_OF_BYTES, MIN_SPEED_OF_FEW_BITS = 0.7, 0.85
"""Goals of products with weights in few bits: with few rows relative to reading them, with more
relative to the model's dtype."""

NUM_ADAPTERS = 16
PEERS = ("vllm", "sglang")
FORMAT = "W4A16, groups of 128"
"""One of `cases.quantised_cases`."""

Goal = dict[str, Any]
Stages = Mapping[str, Mapping[str, Any]]


def summarize(stages: Stages) -> list[Goal]:
    """Returns all goals; `passed` is None without a measurement."""
    found = {name: stage.get("found", {}) for name, stage in stages.items()}
    return [
        *_kernels(found.get("kernels", {})),
        *_decode(found.get("decode", {})),
        *_loads(found.get("loads", {})),
        *_pictures(found.get("pictures", {})),
        *_quantised(found.get("quantised", {})),
        *_services(found.get("services", {})),
        *_stages(stages),
    ]


def _goal(name: str, bar: str, measured: float | None, passed: bool | None, **more: Any) -> Goal:
    return {"goal": name, "bar": bar, "measured": measured, "passed": passed, **more}


def _kernels(found: Mapping[str, Any]) -> Iterator[Goal]:
    """Yields the goals of kernels; the worst of all cells counts."""
    cells = [cell for cell in found.get("cells", []) if cell["ratio"] is not None]
    name = "LoRA kernels beside the better tuned peer"
    bar = f"every cell >= {MIN_RATIO} x, or >= {MIN_SHARE_OF_BOUND} of its bound"
    never = f"no cell < {NEVER_BELOW} x"
    if not cells:
        yield _goal(name, bar, None, None)
        yield _goal(name, never, None, None)
        return
    missed = [
        cell["case"]
        for cell in cells
        if cell["ratio"] < MIN_RATIO and cell["share_of_bound"] < MIN_SHARE_OF_BOUND
    ]
    slower = [cell["case"] for cell in cells if cell["ratio"] < NEVER_BELOW]
    # If cells are left out or peers are not tuned, a goal can be missed but not met.
    is_whole = not found["left_out"] and all(
        f"{peer}_tuned_us" in cell for cell in cells for peer in PEERS
    )
    facts = {"cells": len(cells), "is_whole": is_whole}
    for each, measured, bad in (
        (bar, 1 - len(missed) / len(cells), missed),
        (never, min(cell["ratio"] for cell in cells), slower),
    ):
        passed = False if bad else True if is_whole else None
        yield _goal(name, each, measured, passed, missed=bad, **facts)


def _decode(found: Mapping[str, Any]) -> Iterator[Goal]:
    """Yields the goals of the engine's loop, which gives a server's speed."""
    bar = f">= {MIN_SHARE_OF_FLOOR} of the floor"
    loops = found.get("loop", [])
    for num_rows in (1, 32):
        cells = [each for each in loops if each["num_rows"] == num_rows]
        if not cells:
            yield _goal(f"decode, {num_rows} rows", bar, None, None)
        for each in cells:
            share = each["share_of_floor"]
            name = f"decode, {num_rows} rows, {each['num_adapters']} adapters"
            yield _goal(name, bar, share, share >= MIN_SHARE_OF_FLOOR)


def _loads(found: Mapping[str, Any]) -> Iterator[Goal]:
    share = found.get("alone", {}).get("share_of_bus")
    ratio = found.get("decode", {}).get("p99_ratio")
    yield _goal(
        "an adapter's load",
        f">= {MIN_SHARE_OF_BUS} of the measured copy rate",
        share,
        None if share is None else share >= MIN_SHARE_OF_BUS,
    )
    yield _goal(
        "decode's p99 beside loads",
        f"<= {MAX_P99_RATIO} x that without",
        ratio,
        None if ratio is None else ratio <= MAX_P99_RATIO,
    )


def _pictures(found: Mapping[str, Any]) -> Iterator[Goal]:
    ratio = found.get("decode", {}).get("p99_ratio")
    yield _goal(
        "decode's p99 beside pictures",
        f"<= {MAX_P99_RATIO} x that without",
        ratio,
        None if ratio is None else ratio <= MAX_P99_RATIO,
    )


def _quantised(found: Mapping[str, Any]) -> Iterator[Goal]:
    """Yields the goals of the format that servers choose with `--quantize int4`."""
    cells = {each["rows"]: each for each in found.get("cells", []) if each["format"] == FORMAT}
    for rows, key, least, of in (
        *((rows, "share_of_floor", MIN_SHARE_OF_BYTES, "of reading its bytes") for rows in (1, 4)),
        *((rows, "speed", MIN_SPEED_OF_FEW_BITS, "x 16 bits") for rows in (16, 256)),
    ):
        share = cells[rows][key] if rows in cells else None
        passed = None if share is None else share >= least
        yield _goal(f"{FORMAT}, {rows} rows", f">= {least} {of}", share, passed)


def _services(found: Mapping[str, Any]) -> Iterator[Goal]:
    bar = f">= {MIN_SHARE_OF_BASE} of base"
    rounds = {
        (each["streams"], each["adapters"]): each["share_of_base"]
        for each in found.get("rounds", [])
        if not each["is_cold"]
    }
    for streams in (32, 128):
        share = rounds.get((streams, NUM_ADAPTERS))
        passed = None if share is None else share >= MIN_SHARE_OF_BASE
        name = f"tokens/s over gRPC, {streams} streams, {NUM_ADAPTERS} adapters"
        yield _goal(name, bar, share, passed)


def _stages(stages: Stages) -> Iterator[Goal]:
    for name in ("correct", "parity"):
        status = stages.get(name, {}).get("status")
        yield _goal(f"stage {name}", "passes", None, None if status is None else status == "passed")


def table(summary: Sequence[Goal]) -> str:
    """Returns a line for each goal."""
    words = {True: "PASS", False: "MISS", None: "not measured"}
    lines = []
    for goal in summary:
        measured = "" if goal["measured"] is None else f"{goal['measured']:.3g}"
        lines.append(f"{words[goal['passed']]:<13}{goal['goal']}: {goal['bar']}; {measured}")
    return "\n".join(lines)
