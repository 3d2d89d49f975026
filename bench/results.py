"""Writes results as JSON next to a plot, and shows them as a table on the terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import machine

FOLDER = Path("bench/results")


def write(path: Path, workload: str, result: Mapping[str, Any]) -> None:
    """Writes a result, with the machine on which it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"workload": workload, "machine": machine(), **result}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"written to {path}")


def report(
    path: Path, title: str, workload: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Shows rows of equal columns, without the single measurements in `all`, and writes all."""
    columns = [name for name in rows[0] if name != "all"]
    show(title, columns, [[row[name] for name in columns] for row in rows])
    write(path, title, {**workload, "rows": rows})


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Iterable[float], percent: float) -> float:
    """Returns the percentile by nearest rank, the smallest value that `percent` of all values do
    not exceed. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.console import Console  # a machine with a GPU may have no rich
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console(width=120).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)
