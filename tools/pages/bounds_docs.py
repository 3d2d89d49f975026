"""Generates the tables of fields and of the catalog's tables in docs/limits.md.

python -m tools.pages.bounds_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tools.bounds_texts.inference import HTTP_FIELDS, INFERENCE_FIELDS, PULLED_FIELDS
from tools.bounds_texts.line import ACCOUNT, CALLER, SERVER, Line
from tools.bounds_texts.store import STORE_FIELDS, TABLES
from tools.pages.bounds_inventory import limits

PATH = Path(__file__).parents[2] / "docs" / "limits.md"
START = "<!-- `make docs` generates this part from tools/bounds_texts -->"
END = "<!-- the end of the generated part -->"


class Table(NamedTuple):
    """A table of the page. If most lines count for one owner, `owner` names it. The table then has
    no column of owners, and a line names only a different owner."""

    heading: str
    first: str
    """The heading of the first column."""
    lines: Sequence[Line]
    owner: str = ""


SECTIONS = (
    Table("Fields of requests to the store", "Field", STORE_FIELDS),
    Table("Fields of requests to the inference service", "Field", INFERENCE_FIELDS, ACCOUNT),
    Table("Fields of bodies over HTTP", "Field", HTTP_FIELDS, CALLER),
    Table("Fields of the store's answers to an inference service", "Field", PULLED_FIELDS, SERVER),
    Table("Tables of the catalog", "Table", TABLES),
)


def render() -> str:
    """Returns all tables."""
    parts = []
    for table in SECTIONS:
        owner = [] if table.owner else ["Counts for"]
        head = [table.first, "Holds", "Kept", *owner, "Limit"]
        parts += [f"### {table.heading}", ""]
        if table.owner:
            parts += [f"A row counts for {table.owner} unless it names another account.", ""]
        parts += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        parts += [_row(line, table) for line in table.lines]
        parts.append("")
    return "\n".join(parts)


def _row(line: Line, table: Table) -> str:
    bounds = [line.bounded_by]
    if table.lines is STORE_FIELDS or table.lines is INFERENCE_FIELDS:
        bounds = [*_limits(line, of_store=table.lines is STORE_FIELDS), *bounds]
    holds, owner = line.holds, [line.for_whom]
    if table.owner:
        holds += f" (for {line.for_whom})" if line.for_whom != table.owner else ""
        owner = []
    columns = (_names(line.of), holds, line.how_long, *owner, "; ".join(bounds))
    return f"| {' | '.join(columns)} |"


def _limits(line: Line, *, of_store: bool) -> list[str]:
    """Returns the limits of the line's fields that apply before a message is parsed."""
    found: dict[str, list[str]] = {}
    for field in line.of:
        for limit in limits(field, of_store=of_store):
            found.setdefault(limit, []).append(field.rpartition(".")[2])
    several = len(line.of) > 1
    return [
        f"{limit} of {_listed(dict.fromkeys(names))}" if several else limit
        for limit, names in found.items()
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _names(names: Sequence[str]) -> str:
    """Returns names after their messages: `PullAdapter` `digest`, `layout_id`. Neighbouring
    messages with the same fields share them."""
    found: list[tuple[list[str], str]] = []
    for method, group in groupby(names, lambda name: name.partition(".")[0]):
        if not method[0].isupper():
            return _listed(names)
        fields = _listed(name.partition(".")[2] for name in group)
        if found and found[-1][1] == fields:
            found[-1][0].append(method)
        else:
            found.append(([method], fields))
    return "; ".join(f"{_listed(methods)} {fields}" for methods, fields in found)


def written(page: str) -> str:
    """Returns the page with generated tables."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{render()}\n{END}{after}"


def main() -> None:
    PATH.write_text(written(PATH.read_text()))


if __name__ == "__main__":
    main()
