"""Thoughts before a text that has a form, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.grammars.parts import Part, written

SPACE = "/[ \\n]{0,3}/"
"""After thoughts."""


@dataclass(frozen=True, slots=True)
class ThoughtParts:
    """The parts around thoughts: before them, their end, which is one part, and after that.
    `is_begun`: the prompt has begun them."""

    begin: Sequence[Part]
    end: Part
    after: Sequence[Part]
    is_begun: bool = False

    def to_source(self, kind: str, source: str) -> str:
        """Returns the source of a grammar of thoughts, which may be left out unless they are begun,
        and a form."""
        found = {
            "begin": self.begin,
            "end": self.end,
            "after": self.after,
            "is_begun": self.is_begun,
            "kind": kind,
            "source": source,
        }
        return json.dumps(found)


def form_of(source: str) -> tuple[str, str]:
    """Returns the kind and the source of such a grammar's form."""
    found = json.loads(source)
    return found["kind"], found["source"]


def to_lark(source: str, form: str) -> str:
    """Returns such a grammar in Lark; `form` is its form in Lark."""
    found = json.loads(source)
    end = found["end"]
    thoughts = f"thoughts {written(found['after'])} {SPACE}"
    if not found["is_begun"]:
        thoughts = f"({written(found['begin'])} {thoughts})?"
    if isinstance(end, int):
        rule = f"thoughts: /(?s:.*)/ {written([end])}"
    else:
        rule = f"thoughts[suffix={json.dumps(end)}]: /(?s:.*)/"
    return f"start: {thoughts} form\n{rule}\nform: %lark {{\n{form}\n}}\n"
