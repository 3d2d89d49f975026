"""Figures of a benchmark as people read them."""

from __future__ import annotations

from rich.table import Table

from loadout.benchmark.compare import Verdict
from loadout.benchmark.measure import METRICS, Figures


def figures_table(rounds: list[Figures], medians: Figures) -> Table:
    """The median of each metric, and from where to where the rounds reach."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "median", "lowest", "highest"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, figure in medians.items():
        values = [each[name] for each in rounds]
        table.add_row(name, *(shown(name, value) for value in (figure, min(values), max(values))))
    return table


def comparison_table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in ("metric", "baseline", "now", "change", "tolerance", ""):
        table.add_column(column, justify="left" if column in ("metric", "") else "right")
    for each in verdicts:
        change = (each.now - each.before) / each.before
        said = "worse" if each.is_regression else "ok"
        table.add_row(
            each.metric,
            shown(each.metric, each.before),
            shown(each.metric, each.now),
            f"{change:+.1%}",
            f"{each.tolerance:.0%}",
            said,
            style="red" if each.is_regression else None,
        )
    return table


def shown(name: str, value: float) -> str:
    """With its unit."""
    if METRICS[name].unit == "s":
        return f"{value * 1000:.2f} ms"
    return f"{value:.1f} {METRICS[name].unit}"
