"""Calls of tools that an answer has to make, as a grammar: texts, tokens, and JSON between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Part = str | int
"""A text, or the id of a special token."""

SPACE = "/[ \\n]{0,3}/"
"""After thoughts."""


def to_source(
    begin: Sequence[Part],
    separator: Sequence[Part] | None,
    end: Sequence[Part],
    forms: Sequence[tuple[Sequence[Part], Mapping[str, Any], Sequence[Part]]],
    max_calls: int,
    thoughts: tuple[Sequence[Part], Sequence[Part], Sequence[Part]] | None,
    *,
    starts_thinking: bool,
) -> str:
    """Returns the source of a grammar of calls: `begin`, one of the `forms` or several with
    `separator` between, up to `max_calls` (0: any number), and `end`. A form is a begin, the schema
    of the JSON after it, and an end. `thoughts`, with their begin, their end, and the text behind
    them, may come first; with `starts_thinking` the prompt has begun them."""
    found = {
        "begin": begin,
        "separator": separator,
        "end": end,
        "forms": forms,
        "max_calls": max_calls,
        "thoughts": thoughts,
        "starts_thinking": starts_thinking,
    }
    return json.dumps(found)


def to_lark(source: str, json_of: Callable[[str], str]) -> str:
    """Returns such a grammar in Lark; `json_of` makes a JSON schema's part of it."""
    found = json.loads(source)
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(found['forms'])))}"]
    for index, (begin, schema, end) in enumerate(found["forms"]):
        rules.append(f"call_{index}: {_parts(begin)} arguments_{index} {_parts(end)}")
        rules.append(f"arguments_{index}: {json_of(json.dumps(schema))}")
    more = ""
    if found["separator"] is not None and found["max_calls"] != 1:
        times = f"{{0,{found['max_calls'] - 1}}}" if found["max_calls"] else "*"
        more = f"({_parts(found['separator'])} call){times}"
    calls = f"{_parts(found['begin'])} call {more} {_parts(found['end'])}"
    if found["thoughts"] is None:
        return "\n".join([f"start: {calls}", *rules, ""])
    begin, end, after = found["thoughts"]
    thoughts = f"thoughts {_parts(after)} {SPACE}"
    if not found["starts_thinking"]:
        thoughts = f"({_parts(begin)} {thoughts})?"
    rules.append(_thoughts(end))
    return "\n".join([f"start: {thoughts} {calls}", *rules, ""])


def _thoughts(end: Sequence[Part]) -> str:
    """Returns the rule of any text up to an end."""
    [last] = end
    if isinstance(last, int):
        return f"thoughts: /(?s:.*)/ {_parts(end)}"
    return f"thoughts[suffix={json.dumps(last)}]: /(?s:.*)/"


def _parts(parts: Sequence[Part]) -> str:
    written = (f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
    return " ".join(written)
