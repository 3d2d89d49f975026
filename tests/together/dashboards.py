"""The queries of Grafana's dashboards as Grafana sends them, when a reader has chosen All."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.dashboards.__main__ import FOLDER as FOLDER
from tools.dashboards.reading import Json, everything, expand, label_values, panels, variables
from tools.prometheus import Prometheus

WINDOW_S, RANGE_S = 10, 30


@dataclass(frozen=True, slots=True)
class Query:
    """`where` says whose it is, for the failure."""

    where: str
    promql: str


class Dashboard:
    """One file. Its variables have the values that `prometheus` gives them."""

    def __init__(self, path: Path, prometheus: Prometheus) -> None:
        self._content: Json = json.loads(path.read_text())
        self.name = path.stem
        self._values = everything(
            self._content, prometheus.label_values, window_s=WINDOW_S, range_s=RANGE_S
        )
        self.without_values = [
            f"{self.name}: {name}"
            for name, variable in variables(self._content).items()
            if variable["type"] == "query" and not self._choices(variable, prometheus)
        ]

    def _choices(self, variable: Json, prometheus: Prometheus) -> list[str]:
        series, label = label_values(variable)
        return prometheus.label_values(label, expand(series, self._values))

    def queries(self) -> Iterator[Query]:
        for panel in panels(self._content):
            for target in panel["targets"]:
                where = f"{self.name}: {panel['title']}: {target['refId']}"
                yield Query(where, expand(target["expr"], self._values))
