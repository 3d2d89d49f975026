"""The previews: queries as Grafana asks them, and answers where the panels are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from tools.dashboards.__main__ import FOLDER
from tools.dashboards.panels import Column, Panel, Query, distribution, lines, number, rows_by
from tools.dashboards.preview.amounts import show
from tools.dashboards.preview.drawing import DPI, INCHES_PER_COLUMN, draw
from tools.dashboards.preview.figures import draw_panel
from tools.dashboards.preview.reading import (
    Json,
    asked,
    choices,
    everything,
    expand,
    names_in,
    variables,
)
from tools.prometheus import Series

TIMES = (100.0, 102.0, 104.0)


def series(*values: float, **labels: str) -> Series:
    return Series(labels, tuple(zip(TIMES, values, strict=False)))


def as_json(panel: Panel) -> Json:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    return dict(json.loads(json.dumps(panel.build(), cls=JSONEncoder)))


def drawn(panel: Panel, *answers: list[Series]) -> Any:
    axes = Figure().add_subplot()
    draw_panel(axes, as_json(panel), answers)
    return axes


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0123, "s", "12.3 ms"),
        (4e-5, "s", "40 µs"),
        (90, "s", "90 s"),
        (0, "s", "0 s"),
        (0.125, "percentunit", "12.5 %"),
        (1234, "reqps", "1.23 kreq/s"),
        (1536, "bytes", "1.5 KiB"),
        (math.nan, "short", "-"),
        (math.inf, "s", "∞"),
    ],
)
def test_values_are_shown_in_their_unit(value: float, unit: str, shown: str) -> None:
    assert show(value, unit) == shown


def test_every_unit_of_the_dashboards_can_be_shown() -> None:
    for path in FOLDER.iterdir():
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                assert show(1.0, panel["fieldConfig"]["defaults"]["unit"])


class Jobs:
    """Knows of two, one of them with a name that regular expressions care about."""

    def label_values(self, label: str, selector: str = "") -> list[str]:
        return ["former", "base"] if label == "adapter" else ["a"]

    def query(self, promql: str) -> list[Series]:
        asked_for = 'loadout_store_build_info{cluster=~".*",namespace=~".*"}[7d]'
        assert promql == f"group by (job) (last_over_time({asked_for}))"
        return [series(1, job="adapter-store"), series(1, job="a.b")]


def test_all_is_what_grafana_makes_of_it() -> None:
    board = json.loads((FOLDER / "store.json").read_text())
    values = everything(board, Jobs(), window_s=15, range_s=120)
    assert values["namespace"] == ".*"
    assert values["store_job"] == r"a\\.b|adapter\\-store"
    query = 'rate(x{job=~"$store_job"}[$__rate_interval]) + ${__range}'
    assert expand(query, values) == 'rate(x{job=~"a\\\\.b|adapter\\\\-store"}[15s]) + 120s'
    assert names_in(query) == {"store_job", "__rate_interval", "__range"}
    with pytest.raises(KeyError, match="nobody"):
        expand("$nobody", values)


def test_choices_are_what_a_variables_expression_leaves() -> None:
    board = json.loads((FOLDER / "adapters.json").read_text())
    nothing = {"inference_job": "a", "inference_instance": "a", "cluster": "", "namespace": ""}
    assert choices(variables(board)["adapter"], nothing, Jobs()) == ["base"]
    other = {"name": "x", "query": {"query": "label_names()"}}
    with pytest.raises(ValueError, match="x is neither"):
        asked(other)


def test_lines_have_their_legends_and_start_at_zero() -> None:
    panel = lines("Title", "What.", "s", Query("x", "{{a}}-{{b}}"), Query("y", "total"))
    axes = drawn(panel, [series(1, math.nan, 3, a="u", b="v")], [series(5, 6, 7)])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["total", "u-v"]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[5, 6, 7], [1, 3]]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 7


def test_stacked_series_lie_on_each_other() -> None:
    panel = lines("Title", "What.", "s", Query("x", "{{a}}"), is_stacked=True)
    axes = drawn(panel, [series(4, 4, 4, a="u"), series(1, 2, a="v")])
    tops = [area.get_datalim(axes.transData).y1 for area in axes.collections]
    assert tops == [4, 6]


def test_a_panel_without_an_answer_says_so() -> None:
    assert texts(drawn(lines("Title", "What.", "s", Query("x", "x")), [])) == ["no data"]
    assert texts(drawn(number("Title", "What.", "s", "x"), [])) == ["no data"]
    assert texts(drawn(number("Title", "What.", "s", "x"), [series(1, 2, 3)])) == ["3 s"]


def test_a_distribution_has_what_each_bucket_got() -> None:
    cumulative = [series(3, 5, 5, le="+Inf"), series(1, 2, 4, le="0.1"), series(3, 3, 5, le="1")]
    [mesh] = drawn(distribution("Title", "What.", "s", "x"), cumulative).collections
    assert mesh.get_array().tolist() == [[1, 2, 4], [2, 1, 1], [0, 2, 0]]


def test_a_tables_columns_are_joined_by_its_first_label() -> None:
    columns = [Column("Rate", "x", "reqps"), Column("Time", "y", "s")]
    panel = rows_by("Title", "What.", ["name", "kind"], columns)
    answers = [series(1, name="a"), series(2, name="b")], [series(0.5, name="a", kind="k")]
    [table] = drawn(panel, *answers).tables
    rows: dict[int, list[str]] = {}
    for (row, _), cell in sorted(table.get_celld().items()):
        rows.setdefault(row, []).append(cell.get_text().get_text())
    assert rows == {
        0: ["name", "kind", "Rate", "Time"],
        1: ["b", "", "2 req/s", ""],
        2: ["a", "k", "1 req/s", "500 ms"],
    }


def test_rows_of_a_name_that_is_there_twice_stay_apart() -> None:
    columns = [Column("Rate", "x", "reqps"), Column("Time", "y", "s")]
    panel = rows_by("Title", "What.", ["name", "where"], columns)
    answers = (
        [series(1, name="a", where="east"), series(2, name="a", where="west")],
        [series(3, name="a", where="east"), series(4, name="a", where="west")],
    )
    [table] = drawn(panel, *answers).tables
    shown = [cell.get_text().get_text() for _, cell in sorted(table.get_celld().items())]
    assert shown[4:] == ["a", "west", "2 req/s", "4 s", "a", "east", "1 req/s", "3 s"]


def test_a_number_without_a_value_says_so() -> None:
    assert texts(drawn(number("Title", "What.", "short", "x"), [])) == ["no data"]
    panel = number("Title", "What.", "short", "x", missing="no targets")
    assert texts(drawn(panel, [])) == ["no targets"]
    [mapping] = as_json(panel)["fieldConfig"]["defaults"]["mappings"]
    assert mapping["options"] == {
        "match": "null+nan",
        "result": {"text": "no targets", "color": "red"},
    }


def test_a_picture_is_as_wide_as_the_grid(tmp_path) -> None:
    panel = as_json(lines("Title", "What.", "s", Query("x", "x")))
    panel |= {"id": 2, "gridPos": {"x": 0, "y": 1, "w": 8, "h": 8}}
    heading = {"type": "row", "title": "Now", "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}}
    draw({"title": "T", "panels": [heading, panel]}, {2: [[series(1, 2)]]}, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width == 24 * INCHES_PER_COLUMN * DPI
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10
