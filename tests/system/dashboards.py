"""The queries of Grafana's dashboards as Grafana sends them, when a reader has chosen All."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.dashboards.__main__ import FOLDER as FOLDER
from tools.dashboards.preview.reading import Json, choices, everything, expand, panels, variables
from tools.dashboards.queries import INFERENCE, STORE
from tools.prometheus import Prometheus

WINDOW_S, RANGE_S = 10, 30
_OR_ZERO = re.compile(r" or on \(\) 0 \* count\(up\{[^}]*\}\)$")


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel, which `where` names for a failure's message.

    `is_by_replica`: it has a series for each replica or each catalog. `without_jobs` is the query
    when no job is known.
    """

    where: str
    promql: str
    is_by_replica: bool
    without_jobs: str

    @property
    def bare(self) -> str:
        """The query without the zero that stands for what has no series yet."""
        return _OR_ZERO.sub("", self.promql)


class Dashboard:
    """A dashboard's file, whose variables have the values that `prometheus` gives them."""

    def __init__(self, path: Path, prometheus: Prometheus) -> None:
        self._content: Json = json.loads(path.read_text())
        self.name = path.stem
        self._values = everything(self._content, prometheus, window_s=WINDOW_S, range_s=RANGE_S)
        self.choices = {
            name: choices(variable, self._values, prometheus)
            for name, variable in variables(self._content).items()
            if variable["type"] == "query"
        }

    def queries(self) -> Iterator[Query]:
        """Yields the queries of all panels."""
        for panel in panels(self._content):
            yield from self._of(panel)

    def queries_that_tell_of_nothing(self) -> Iterator[Query]:
        """Yields the queries of panels that show a text of their own where there is no value."""
        for panel in panels(self._content):
            if panel["fieldConfig"]["defaults"].get("mappings"):
                yield from self._of(panel)

    def _of(self, panel: Json) -> Iterator[Query]:
        nobody = dict.fromkeys((f"{INFERENCE.name}_job", f"{STORE.name}_job"), "")
        for target in panel["targets"]:
            yield Query(
                f"{self.name}: {panel['title']}: {target['refId']}",
                expand(target["expr"], self._values),
                "{{cluster}}" in target.get("legendFormat", "") or _has_column(panel, "cluster"),
                expand(target["expr"], self._values | nobody),
            )


def _has_column(panel: Json, name: str) -> bool:
    """Returns whether a panel is a table that has this column."""
    changes = (each["options"] for each in panel.get("transformations", []))
    return any(name in options.get("indexByName", {}) for options in changes)
