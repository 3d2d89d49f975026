"""Generates the tables of fields and of the catalog's tables in docs/security.md.

python -m tools.bounds_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tools.bounds_inventory import limits
from tools.bounds_texts.inference import HTTP_FIELDS, INFERENCE_FIELDS, PULLED_FIELDS
from tools.bounds_texts.line import Line
from tools.bounds_texts.store import STORE_FIELDS, TABLES

PATH = Path(__file__).parent.parent / "docs" / "security.md"
START = "<!-- `make docs` generates what follows from tools/bounds_texts -->"
END = "<!-- the end of what is generated -->"

HEAD = "| {} | Holds | For how long | For whom | Bounded by, before it is read | Tests |"


def render() -> str:
    """Returns all tables."""
    sections = (
        ("### Fields of requests to the store", "Field", STORE_FIELDS),
        ("### Fields of requests to the inference service", "Field", INFERENCE_FIELDS),
        ("### Fields of bodies over HTTP", "Field", HTTP_FIELDS),
        ("### What an inference service reads of a store's answers", "Field", PULLED_FIELDS),
        ("### Tables of the catalog", "Table", TABLES),
    )
    parts = []
    for heading, first, lines in sections:
        parts += [heading, "", HEAD.format(first), "|---|---|---|---|---|---|"]
        parts += [_row(line, lines) for line in lines]
        parts.append("")
    return "\n".join(parts)


def _row(line: Line, lines: Sequence[Line]) -> str:
    bounds = [line.bounded_by]
    if lines is STORE_FIELDS or lines is INFERENCE_FIELDS:
        bounds = [*_limits(line, of_store=lines is STORE_FIELDS), *bounds]
    tests = ", ".join(f"`{name}`" for name in line.tests)
    columns = (_names(line.of), line.holds, line.how_long, line.for_whom, "; ".join(bounds), tests)
    return f"| {' | '.join(columns)} |"


def _limits(line: Line, *, of_store: bool) -> list[str]:
    """Returns what is counted of the line's fields before a message is parsed."""
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
    """Returns names of one message after it: `PullAdapter` `digest`, `layout_id`."""
    found = []
    for method, group in groupby(names, lambda name: name.partition(".")[0]):
        fields = [name.partition(".")[2] for name in group]
        is_message = method[0].isupper()
        found.append(f"`{method}` {_listed(fields)}" if is_message else "")
    if not all(found):
        return _listed(names)
    return "; ".join(found)


def written(page: str) -> str:
    """Returns the page with the tables as they should be."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{render()}\n{END}{after}"


def main() -> None:
    PATH.write_text(written(PATH.read_text()))


if __name__ == "__main__":
    main()
