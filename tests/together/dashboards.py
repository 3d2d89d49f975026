"""The queries of Grafana's dashboards as Grafana sends them, when a reader has chosen All."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.prometheus import Prometheus

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
MACROS = {
    "__rate_interval": "10s",
    "__interval": "2s",
    "__interval_ms": "2000",
    "__range": "30s",
    "__range_s": "30",
    "__range_ms": "30000",
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((?:(.+),\s*)?(\w+)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """`where` says whose it is, for the failure."""

    where: str
    promql: str


class Dashboard:
    """One file. Its variables have the values that `prometheus` gives them."""

    def __init__(self, path: Path, prometheus: Prometheus) -> None:
        self._content: dict[str, Any] = json.loads(path.read_text())
        self.name = path.stem
        self.variables = dict(MACROS)
        self.without_values: list[str] = []
        for variable in self._content["templating"]["list"]:
            if variable["type"] == "query":
                self._choose_all(variable, prometheus)

    def _choose_all(self, variable: dict[str, Any], prometheus: Prometheus) -> None:
        query = variable["query"]
        text = query if isinstance(query, str) else query["query"]
        match = _LABEL_VALUES.fullmatch(text)
        assert match, f"{self.name}: {variable['name']} asks for {text}"
        values = prometheus.label_values(match[2], self.substitute(match[1] or ""))
        if not values:
            self.without_values.append(f"{self.name}: {variable['name']}")
        self.variables[variable["name"]] = variable.get("allValue") or "|".join(values)

    def substitute(self, promql: str) -> str:
        """With values in place of variables. Raises KeyError for one that there is not."""
        return _VARIABLE.sub(lambda match: self.variables[match[1] or match[2]], promql)

    def queries(self) -> Iterator[Query]:
        for panel in _panels(self._content):
            for target in panel.get("targets", []):
                where = f"{self.name}: {panel['title']}: {target.get('refId', '')}"
                yield Query(where, self.substitute(target["expr"]))


def _panels(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows may have theirs within."""
    for panel in content.get("panels", []):
        yield panel
        yield from _panels(panel)
