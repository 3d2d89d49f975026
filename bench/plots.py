"""Draws one plot for each workload, from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _pyplot() -> Any:
    # Imported here, because users of a workload's traffic alone may have no matplotlib.
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_bars(
    path: Path, title: str, unit: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]
) -> None:
    """Draws a group of bars for each name in `groups`, with a bar for each series; NaN leaves a
    gap."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(7, 1.4 * len(groups)), 4.5), layout="constrained")
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [group + index * width for group in range(len(groups))]
        axes.bar(places, values, width, label=name)
    middle = width * (len(series) - 1) / 2
    axes.set_xticks([group + middle for group in range(len(groups))], _wrapped(groups))
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"written to {path}")


def plot_lines(
    path: Path,
    title: str,
    labels: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = False,
) -> None:
    """Draws each series, a list of points, as a line; `labels` name the axes."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    if log_x:
        axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"written to {path}")


def plot_throughput(summaries: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draws tokens per second, by model, row and system."""
    rows = {
        row if len(summaries) == 1 else f"{model}, {row}": rates
        for model, summary in summaries.items()
        for row, rates in summary.items()
    }
    systems = [
        system
        for system in ("floor", "ours", "ours-grpc", "vllm best", "peft")
        if any(system in rates for rates in rows.values())
    ]
    series = {
        system: [rates.get(system, float("nan")) for rates in rows.values()] for system in systems
    }
    title = f"W1, {' and '.join(summaries)}"
    plot_bars(path, title, "output tokens per second", list(rows), series)


def _wrapped(names: Sequence[str]) -> list[str]:
    return [name.replace(", ", ",\n") for name in names]
