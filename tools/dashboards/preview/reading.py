"""Reads dashboards as Grafana does: their panels and queries, and the queries' text when all values
are chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tools.prometheus import Series

Json = dict[str, Any]


class Source(Protocol):
    """Answers the queries for the values of variables."""

    def label_values(self, label: str, selector: str = "", /) -> Sequence[str]:
        """Returns the values of a label in the selector's series."""

    def query(self, promql: str, /) -> Sequence[Series]:
        """Returns the current answer."""


VARIABLE = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)", re.DOTALL)
_QUERY_RESULT = re.compile(r"query_result\((.+)\)", re.DOTALL)


def panels(board: Json) -> list[Json]:
    """Returns all panels except the headings of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: Json) -> Iterator[str]:
    """Yields the PromQL of all panels and annotations."""
    for panel in panels(board):
        yield from (target["expr"] for target in panel["targets"])
    yield from (mark["expr"] for mark in board["annotations"]["list"])


def variables(board: Json) -> dict[str, Json]:
    """Returns the board's variables by name."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def asked(variable: Json) -> str:
    """Returns the selector or query whose answer has a variable's choices. Raises ValueError for a
    variable of another kind."""
    text = str(variable["query"]["query"])
    found = _LABEL_VALUES.fullmatch(text) or _QUERY_RESULT.fullmatch(text)
    if found is None:
        raise ValueError(f"{variable['name']} is neither label_values nor query_result: {text}")
    return found[1]


def choices(variable: Json, values: Mapping[str, str], source: Source) -> list[str]:
    """Returns the choices that Grafana would show; `values` are of the variables before this one.
    Raises as `asked`."""
    promql = expand(asked(variable), values)
    found = _LABEL_VALUES.fullmatch(str(variable["query"]["query"]))
    if found is not None:
        shown = list(source.label_values(found[2], promql))
    else:
        shown = [_line(series) for series in source.query(promql)]
    chosen = variable.get("regex", "").strip("/")
    matches = (re.search(chosen, each) for each in shown)
    return sorted({match[match.re.groups] for match in matches if match} if chosen else shown)


def _line(series: Series) -> str:
    """Formats a series as Grafana does, for regular expressions to search."""
    labels = ",".join(f'{name}="{value}"' for name, value in series.labels.items())
    return f"{{{labels}}} {series.value:g}"


def names_in(text: str) -> set[str]:
    """Returns the variables in a query or an address, including Grafana's own."""
    return {braced or plain for braced, plain in VARIABLE.findall(text)}


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replaces the variables in `text`. Raises KeyError for a variable without a value."""
    return VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def everything(board: Json, source: Source, *, window_s: float, range_s: float) -> dict[str, str]:
    """Returns the values of all variables when All is chosen for each. `window_s` is Grafana's rate
    interval, `range_s` the chosen time."""
    values = {"__rate_interval": f"{window_s:.0f}s", "__range": f"{range_s:.0f}s"}
    for name, variable in variables(board).items():
        if variable["type"] == "query":
            values[name] = variable.get("allValue") or _all(variable, values, source)
    return values


def _all(variable: Json, values: Mapping[str, str], source: Source) -> str:
    """Returns all values as Grafana joins them: a regular expression in a string of PromQL, with
    doubled backslashes."""
    found = choices(variable, values, source)
    return "|".join(re.escape(value).replace("\\", r"\\") for value in found)
