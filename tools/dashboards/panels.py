"""The kinds of panels in the dashboards."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.dashboards.limits import BAD, Limit, unlimited
from tools.dashboards.links import Link
from tools.dashboards.queries import Service
from tools.dashboards.variables import DATASOURCE

Panel = Builder[models.Panel]
WIDTH = 24
"""Number of columns of Grafana's grid."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query; `legend` names its series, and {{label}} in it becomes the label's value."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: one query, with its value under `title`."""

    title: str
    expression: str
    unit: str


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 8,
    limit: Limit | None = None,
    maximum: float | None = None,
    is_stacked: bool = False,
    links: Sequence[Link] = (),
) -> Panel:
    """Shows series over time, from zero to `maximum`, with `limit` as a dashed line."""
    panel = timeseries.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.unit(unit).min(0).span(span).height(8).targets(_targets(queries))
    panel.line_width(1).fill_opacity(40 if is_stacked else 8)
    panel.show_points(options.VisibilityMode.NEVER)
    panel.legend(_legend()).tooltip(
        common.VizTooltipOptions()
        .mode(options.TooltipDisplayMode.MULTI)
        .sort(options.SortOrder.DESCENDING)
    )
    panel.thresholds(limit.thresholds() if limit else unlimited())
    if limit:
        style = common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    if maximum is not None:
        panel.max(maximum)
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    return panel.data_links([link.builder() for link in links])


def percentiles(
    service: Service,
    title: str,
    description: str,
    metric: str,
    *,
    span: int = 8,
    where: str = "",
    limit: Limit | None = None,
) -> Panel:
    """Shows a histogram's p50, p90 and p99 over time."""
    queries = [
        Query(service.quantile(q, metric, where=where), f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)
    ]
    return lines(title, description, "s", *queries, span=span, limit=limit)


def number(
    title: str,
    description: str,
    unit: str,
    expression: str,
    *,
    span: int = 3,
    limit: Limit | None = None,
    missing: str = "",
    links: Sequence[Link] = (),
) -> Panel:
    """Shows the newest value in large figures, coloured by `limit`, over a small line of earlier
    values. Without a value it shows `missing` in red, or else Grafana's text for no data."""
    panel = stat.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.unit(unit).span(span).height(4).targets(_targets([Query(expression)]))
    panel.graph_mode(options.BigValueGraphMode.AREA).color_mode(options.BigValueColorMode.VALUE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(limit.thresholds() if limit else unlimited())
    if missing:
        panel.mappings([_instead_of_nothing(missing)])
    return panel.data_links([link.builder() for link in links])


def _instead_of_nothing(text: str) -> models.SpecialValueMap:
    result = models.ValueMappingResult(text=text, color=BAD)
    match = models.SpecialValueMatch.NULL_AND_NAN
    return models.SpecialValueMap(models.DashboardSpecialValueMapOptions(match, result))


def distribution(title: str, description: str, unit: str, buckets: str, *, span: int = 8) -> Panel:
    """Shows a histogram over time, darker for more observations; `buckets` is by `le`."""
    panel = heatmap.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.unit("short").span(span).height(8).calculate(False)
    target = _target(0, Query(buckets, "{{le}}")).format(PromQueryFormat.HEATMAP).range()
    panel.targets([target]).y_axis(heatmap.YAxisConfig().unit(unit))
    return panel.show_value(options.VisibilityMode.NEVER)


def rows_by(
    title: str,
    description: str,
    labels: Sequence[str],
    columns: Sequence[Column],
    *,
    span: int = WIDTH,
    height: int = 8,
    link: Link | None = None,
) -> Panel:
    """Shows a table of current values, with a row for each combination of `labels`, which come
    first. Rows are sorted by the first column, and `link` is on the first label."""
    panel = table.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.unit("short").span(span).height(height)
    panel.targets(
        [
            _target(index, Query(column.expression)).format(PromQueryFormat.TABLE).instant()
            for index, column in enumerate(columns)
        ]
    )
    values = {f"Value #{_letter(index)}": each.title for index, each in enumerate(columns)}
    order = {name: index for index, name in enumerate([*labels, *values])}
    organize = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": values}
    panel.transformations(
        [
            models.DataTransformerConfig(id_val="merge", options={}),
            models.DataTransformerConfig(id_val="organize", options=organize),
        ]
    )
    panel.sort_by([common.TableSortByFieldState().display_name(columns[0].title).desc(True)])
    for column in columns:
        panel.override_by_name(column.title, [_property("unit", column.unit)])
    if link:
        panel.override_by_name(labels[0], [_property("links", [link.builder().build()])])
    return panel


def _targets(queries: Sequence[Query]) -> list[Builder[Any]]:
    return [_target(index, query).range() for index, query in enumerate(queries)]


def _target(index: int, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(_letter(index)).datasource(DATASOURCE)
    target.expr(query.expression)
    return target.legend_format(query.legend) if query.legend else target


def _letter(index: int) -> str:
    return string.ascii_uppercase[index]


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(options.LegendDisplayMode.TABLE)
    legend.placement(options.LegendPlacement.BOTTOM).show_legend(True)
    return legend.calcs(["lastNotNull", "max"])


def _property(name: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)
