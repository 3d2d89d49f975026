"""A text that has one of several forms, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from inference_svc.grammars.calls import Part, written


def to_source(forms: Sequence[tuple[Sequence[Part], str, str]]) -> str:
    """Returns the source of such a grammar. Each form has parts that may come before it, a kind and
    a source."""
    return json.dumps(forms)


def forms_of(source: str) -> list[tuple[str, str]]:
    """Returns the kinds and the sources of such a grammar's forms."""
    return [(kind, inner) for _, kind, inner in json.loads(source)]


def to_lark(source: str, form_to_lark: Callable[[str, str], str]) -> str:
    """Returns such a grammar in Lark; `form_to_lark` makes a form's."""
    rules = []
    found = json.loads(source)
    for index, (begin, kind, inner) in enumerate(found):
        before = f"({written(begin)})?" if begin else ""
        lark = form_to_lark(kind, inner)
        rules.append(f"form_{index}: {before} inner_{index}")
        rules.append(f"inner_{index}: %lark {{\n{lark}\n}}")
    return "\n".join([f"start: {' | '.join(f'form_{i}' for i in range(len(found)))}", *rules, ""])
