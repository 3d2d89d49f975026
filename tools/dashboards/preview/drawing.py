"""Draws a dashboard's answers with matplotlib, in the places of its panels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tools.dashboards.preview.figures import draw_panel
from tools.dashboards.preview.reading import Json
from tools.prometheus import Series

Answers = dict[int, list[list[Series]]]
"""The answers to each of a panel's queries, in order, by the panel's id."""

INCHES_PER_COLUMN, INCHES_PER_LINE = 0.75, 0.27
DPI = 90
NUM_COLUMNS = 24
MARGINS = {"left": 0.6, "right": 0.15, "top": 0.25, "bottom": 0.25}
"""Inches of a panel around its axes."""
NUM_COLOURS = 200
"""Size of the palette, which makes the file a third as large as with true colour."""


def draw(board: Json, answers: Answers, path: Path) -> None:
    """Writes the picture."""
    plt = _pyplot()
    num_lines = 2 + max(_bottom(panel) for panel in board["panels"])
    width, height = NUM_COLUMNS * INCHES_PER_COLUMN, num_lines * INCHES_PER_LINE
    figure = plt.figure(figsize=(width, height), dpi=DPI)
    figure.text(0.01, 1 - 0.3 / height, board["title"], fontsize=15, weight="bold", va="center")
    for panel in board["panels"]:
        place = panel["gridPos"]
        left = place["x"] * INCHES_PER_COLUMN
        top = (place["y"] + 2) * INCHES_PER_LINE
        if panel["type"] == "row":
            y = 1 - (top + 0.5 * INCHES_PER_LINE) / height
            figure.text(0.01, y, panel["title"], fontsize=12, weight="bold", va="center")
            continue
        inner = (
            left + MARGINS["left"],
            height - top - place["h"] * INCHES_PER_LINE + MARGINS["bottom"],
            place["w"] * INCHES_PER_COLUMN - MARGINS["left"] - MARGINS["right"],
            place["h"] * INCHES_PER_LINE - MARGINS["top"] - MARGINS["bottom"],
        )
        axes = figure.add_axes(_shares(inner, width, height))
        draw_panel(axes, panel, answers[panel["id"]])
    _save(figure, path)
    plt.close(figure)


def _bottom(panel: Json) -> int:
    return int(panel["gridPos"]["y"] + panel["gridPos"]["h"])


def _shares(inches: Sequence[float], width: float, height: float) -> tuple[float, ...]:
    x, y, w, h = inches
    return x / width, y / height, w / width, h / height


def _save(figure: Any, path: Path) -> None:
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=DPI)
    picture = Image.open(whole).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
