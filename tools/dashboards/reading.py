"""Reads dashboards as Grafana does: which panels and queries there are, and what is asked when
everything is chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
LabelValues = Callable[[str, str], Sequence[str]]
"""Gives the values that a label has in series of a selector."""

VARIABLE = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)", re.DOTALL)


def panels(board: Json) -> list[Json]:
    """All but the headings of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: Json) -> Iterator[str]:
    """The PromQL of all panels and annotations."""
    for panel in panels(board):
        yield from (target["expr"] for target in panel["targets"])
    yield from (mark["expr"] for mark in board["annotations"]["list"])


def variables(board: Json) -> dict[str, Json]:
    """By name."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def label_values(variable: Json) -> tuple[str, str]:
    """The series and the label whose values can be chosen. Raises ValueError for a variable that is
    asked for in another way."""
    found = _LABEL_VALUES.fullmatch(str(variable["query"]["query"]))
    if found is None:
        raise ValueError(f"{variable['name']} is not made of label_values: {variable['query']}")
    return found[1], found[2]


def names_in(text: str) -> set[str]:
    """The variables that a query or an address uses, Grafana's own among them."""
    return {braced or plain for braced, plain in VARIABLE.findall(text)}


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with variables replaced. Raises KeyError for one that has no value."""
    return VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def everything(
    board: Json, known: LabelValues, *, window_s: float, range_s: float
) -> dict[str, str]:
    """What variables stand for when All is chosen of each. `window_s` is Grafana's rate interval,
    `range_s` the chosen time."""
    values = {"__rate_interval": f"{window_s:.0f}s", "__range": f"{range_s:.0f}s"}
    for name, variable in variables(board).items():
        if variable["type"] == "query":
            values[name] = variable.get("allValue") or _all(variable, values, known)
    return values


def _all(variable: Json, values: Mapping[str, str], known: LabelValues) -> str:
    """As Grafana joins them: a regular expression in a string of PromQL, where a backslash is
    written twice."""
    series, label = label_values(variable)
    found = known(label, expand(series, values))
    return "|".join(re.escape(value).replace("\\", r"\\") for value in found)
