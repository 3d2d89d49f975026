"""Draws one panel's answers in one pair of axes: lines, a number, a distribution or a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from tools.dashboards.preview.amounts import show
from tools.dashboards.preview.reading import Json
from tools.prometheus import Series

SMALL, TINY = 8, 6.5
MAX_LEGEND = 8
"""Maximum entries; the largest are shown."""
HEADROOM = 1.4
"""Factor by which the axis exceeds the data, for the legend."""


def draw_panel(axes: Any, panel: Json, answers: Sequence[Sequence[Series]]) -> None:
    """Draws a panel from the answers to its queries, in order, over seconds since a start."""
    axes.set_title(panel["title"], fontsize=SMALL, loc="left", weight="bold", pad=3)
    axes.tick_params(labelsize=TINY, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    draw = {
        "timeseries": _lines,
        "stat": _number,
        "heatmap": _distribution,
        "table": _table,
    }[panel["type"]]
    draw(axes, panel, answers)


def _lines(axes: Any, panel: Json, answers: Sequence[Sequence[Series]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    defaults = panel["fieldConfig"]["defaults"]
    named = [
        (_legend(target.get("legendFormat", ""), series), _known(series))
        for target, found in zip(panel["targets"], answers, strict=True)
        for series in found
    ]
    named = sorted(((name, points) for name, points in named if points), key=_size, reverse=True)
    is_stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    (_stack if is_stacked else _plot)(axes, named)
    axes.set_ylim(0, HEADROOM * axes.dataLim.y1 if named and axes.dataLim.y1 > 0 else 1)
    _draw_limit(axes, defaults)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, defaults["unit"])))
    axes.grid(axis="y", linewidth=0.3)
    if named:
        _time_axis(axes)
        axes.legend(fontsize=TINY, loc="upper left", framealpha=0.6, ncols=2, borderpad=0.2)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, fontsize=SMALL, ha="center")


Named = tuple[str, list[tuple[float, float]]]


def _plot(axes: Any, named: Sequence[Named]) -> None:
    for index, (name, points) in enumerate(named):
        label = name if index < MAX_LEGEND else None
        axes.plot(*zip(*points, strict=True), linewidth=1, label=label)


def _stack(axes: Any, named: Sequence[Named]) -> None:
    """Stacks series; a series without a point at some moment adds nothing there."""
    times = sorted({when for _, points in named for when, _ in points})
    below = [0.0] * len(times)
    for index, (name, points) in enumerate(named):
        at = dict(points)
        above = [under + at.get(when, 0.0) for under, when in zip(below, times, strict=True)]
        label = name if index < MAX_LEGEND else None
        axes.fill_between(times, below, above, linewidth=0.5, alpha=0.6, label=label)
        below = above


def _draw_limit(axes: Any, defaults: Json) -> None:
    """Draws the panel's threshold, unless it would press the lines flat."""
    steps = defaults["thresholds"]["steps"]
    is_shown = "thresholdsStyle" in defaults["custom"]
    if is_shown and len(steps) > 1 and steps[1]["value"] <= 3 * axes.get_ylim()[1]:
        axes.axhline(steps[1]["value"], linestyle="--", linewidth=0.8, color="red")


def _number(axes: Any, panel: Json, answers: Sequence[Sequence[Series]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    points = [point for found in answers for series in found for point in _known(series)]
    if points:
        times, values = zip(*points, strict=True)
        axes.fill_between(times, values, color="tab:green", alpha=0.25, linewidth=0)
        axes.set_ylim(0, 2.5 * max(*values, 1e-9))
    text = show(points[-1][1], defaults["unit"]) if points else _nothing(defaults)
    axes.text(0.5, 0.6, text, transform=axes.transAxes, fontsize=15, ha="center", va="center")
    axes.set_xticks([])
    axes.set_yticks([])


def _nothing(defaults: Json) -> str:
    """Returns the text for a missing value."""
    texts = [mapping["options"]["result"]["text"] for mapping in defaults.get("mappings", [])]
    return str(texts[0]) if texts else "no data"


def _distribution(axes: Any, panel: Json, answers: Sequence[Sequence[Series]]) -> None:
    """Draws a histogram over time. Series are cumulative by their label le; a cell has the growth
    of its own bucket."""
    buckets = sorted(answers[0], key=lambda series: float(series.labels["le"]))
    times = sorted({when for series in buckets for when, _ in series.points})
    rows, below = [], dict.fromkeys(times, 0.0)
    for series in buckets:
        counts = dict(series.points)
        rows.append([max(0.0, counts.get(when, 0.0) - below[when]) for when in times])
        below = {when: counts.get(when, 0.0) for when in times}
    axes.pcolormesh(times, range(len(rows)), rows, cmap="Oranges", shading="nearest")
    unit = panel["options"]["yAxis"]["unit"]
    ticks = range(0, len(rows), 3)
    axes.set_yticks(ticks, [show(float(buckets[index].labels["le"]), unit) for index in ticks])
    _time_axis(axes)


def _table(axes: Any, panel: Json, answers: Sequence[Sequence[Series]]) -> None:
    """Draws a table, with rows joined by the labels that all answers have."""
    organized = panel["transformations"][-1]["options"]
    names = sorted(organized["indexByName"], key=organized["indexByName"].__getitem__)
    labels = [name for name in names if name not in organized["renameByName"]]
    titles = [organized["renameByName"][name] for name in names if name not in labels]
    units = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in panel["fieldConfig"]["overrides"]
    }
    keys = [name for name in labels if all(_have(found, name) for found in answers)]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for title, found in zip(titles, answers, strict=True):
        for series in sorted(found, key=lambda series: series.value, reverse=True):
            row = rows.setdefault(tuple(series.labels.get(name, "") for name in keys), {})
            row |= {name: series.labels[name] for name in labels if name in series.labels}
            row[title] = show(series.value, units[title])
    axes.axis("off")
    columns = [*labels, *titles]
    num_rows = panel["gridPos"]["h"] + 1
    cells = [[row.get(column, "") for column in columns] for row in rows.values()][:num_rows]
    drawn = axes.table(cells, colLabels=columns, loc="upper center", cellLoc="left", edges="B")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(SMALL)


def _have(found: Sequence[Series], label: str) -> bool:
    return any(label in series.labels for series in found)


def _time_axis(axes: Any) -> None:
    axes.margins(x=0)
    axes.xaxis.set_major_formatter("{x:.0f} s")


def _known(series: Series) -> list[tuple[float, float]]:
    return [(when, value) for when, value in series.points if math.isfinite(value)]


def _size(named: Named) -> float:
    return sum(value for _, value in named[1])


def _legend(template: str, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), template)
