"""Calls of tools that an answer has to make, as a grammar: texts, tokens, and JSON between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Part = str | int
"""A text, or the id of a special token."""


def to_source(
    begin: Sequence[Part],
    separator: Sequence[Part] | None,
    end: Sequence[Part],
    forms: Sequence[tuple[Sequence[Part], Mapping[str, Any], Sequence[Part]]],
    max_calls: int,
) -> str:
    """Returns the source of a grammar of calls: `begin`, one of the `forms` or several with
    `separator` between, up to `max_calls` (0: any number), and `end`. A form is a begin, the schema
    of the JSON after it, and an end."""
    found = {
        "begin": begin,
        "separator": separator,
        "end": end,
        "forms": forms,
        "max_calls": max_calls,
    }
    return json.dumps(found)


def schemas(source: str) -> list[dict[str, Any]]:
    """Returns the schemas of such a grammar's calls, in the order of its forms."""
    return [schema for _, schema, _ in json.loads(source)["forms"]]


def to_lark(source: str, json_of: Callable[[str], str]) -> str:
    """Returns such a grammar in Lark; `json_of` makes a JSON schema's part of it."""
    found = json.loads(source)
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(found['forms'])))}"]
    for index, (begin, schema, end) in enumerate(found["forms"]):
        rules.append(f"call_{index}: {written(begin)} arguments_{index} {written(end)}")
        rules.append(f"arguments_{index}: {json_of(json.dumps(schema))}")
    more = ""
    if found["separator"] is not None and found["max_calls"] != 1:
        times = f"{{0,{found['max_calls'] - 1}}}" if found["max_calls"] else "*"
        more = f"({written(found['separator'])} call){times}"
    calls = f"{written(found['begin'])} call {more} {written(found['end'])}"
    return "\n".join([f"start: {calls}", *rules, ""])


def written(parts: Sequence[Part]) -> str:
    """Returns parts in Lark."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
