"""Combines panels into a dashboard, and writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboards import links, variables
from tools.dashboards.panels import Panel
from tools.dashboards.queries import Service
from tools.dashboards.variables import DATASOURCE, Variable

TAG = "loadout"
_IN_A_MENU = models.DashboardLinkPlacement.IN_CONTROLS_MENU


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, from left to right; their spans fill whole lines."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. Its variables choose jobs and replicas of `services`."""

    uid: str
    description: str
    services: Sequence[Service]
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()

    def build(self) -> models.Dashboard:
        board = builders.Dashboard(links.TITLES[self.uid]).uid(self.uid)
        board.description(self.description).tags([TAG]).refresh("30s").time("now-1h", "now")
        board.timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
        board.variables([variables.datasource(), variables.cluster(), variables.namespace()])
        for service in self.services:
            board.with_variable(variables.job(service)).with_variable(variables.instance(service))
            board.annotation(_starts(service))
        for variable in self.variables:
            board.with_variable(variable)
        board.links(list(links.to_others(self.uid)))
        for row in self.rows:
            board.with_row(builders.Row(row.title))
            for panel in row.panels:
                board.with_panel(panel)
        return _numbered(board.build())

    def to_json(self) -> str:
        """Returns the JSON for Grafana; the same code gives the same text."""
        board = json.loads(json.dumps(self.build(), cls=JSONEncoder))
        return json.dumps(in_sight(board), indent=2, sort_keys=True) + "\n"


def _numbered(board: models.Dashboard) -> models.Dashboard:
    """Numbers the panels in order, because ids are parts of addresses and should rarely change."""
    for index, panel in enumerate(board.panels or [], start=1):
        panel.id_val = index
    return board


def in_sight(part: Any) -> Any:
    """Removes the placement that the SDK gives to links and annotations, so that newer Grafanas
    show them at the top and not only in a menu."""
    if isinstance(part, dict):
        return {key: in_sight(value) for key, value in part.items() if value != _IN_A_MENU}
    return [in_sight(each) for each in part] if isinstance(part, list) else part


def _starts(service: Service) -> builders.AnnotationQuery:
    """Returns a mark for the start of each replica."""
    expression = f"{service.series('process_start_time_seconds')} * 1000"
    mark = builders.AnnotationQuery().name(f"Starts of {service.name}").datasource(DATASOURCE)
    mark.enable(True).icon_color("blue").expr(expression).use_value_for_time(True).step("60s")
    mark.title_format("{{instance}} started")
    return mark.target(prometheus.Dataquery().ref_id("A").expr(expression))
