"""Calls that an answer has to make, and thoughts before them, as parts of a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from inference_svc.grammars.calls import Part
from inference_svc.grammars.thoughts import ThoughtParts
from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.chat import Tool

Form = tuple[Sequence[Part], dict[str, object], Sequence[Part]]


class Cutter:
    """Cuts texts of a syntax at its markers. `token_of` returns the id of a marker that is a
    special token, and None for one that ends answers, which is left out; a marker that is a text
    raises KeyError."""

    def __init__(self, syntax: AnswerSyntax, token_of: Callable[[str], int | None]) -> None:
        self._markers = syntax.specials(calls=True, thoughts=True)
        self._token_of = token_of

    def parts(self, text: str) -> list[Part]:
        """Cuts a text at its special tokens."""
        pattern = "|".join(map(re.escape, self._markers))
        found: list[Part] = []
        for piece in re.split(f"({pattern})", text):
            try:
                token = self._token_of(piece) if piece in self._markers else piece
            except KeyError:
                token = piece
            if token not in (None, ""):
                found.append(token)
        return found

    def thoughts(self, syntax: AnswerSyntax, after: str, *, is_begun: bool) -> ThoughtParts | None:
        """Returns the parts of thoughts and of the text after them; None if the model has none, or
        the answer ends with them."""
        if syntax.thoughts is None:
            return None
        end = self.parts(syntax.thoughts.end)
        if len(end) != 1:
            return None
        return ThoughtParts(self.parts(syntax.thoughts.begin), end[0], self.parts(after), is_begun)


class ForcedCalls:
    """The only texts that an answer may have: calls of one or more of the `tools`, in a syntax that
    a grammar can write. See Cutter for `token_of`."""

    def __init__(
        self, syntax: AnswerSyntax, tools: Sequence[Tool], token_of: Callable[[str], int | None]
    ) -> None:
        calls = syntax.calls
        assert calls is not None, "can_force has said so"
        assert calls.frame is not None, "can_force has said so"
        frame = calls.frame
        of = Cutter(syntax, token_of).parts
        self.begin, self.end = of(frame.begin), of(frame.end)
        self.separator = of(frame.separator) if frame.separator else None
        self.forms: list[Form] = []
        for tool in tools:
            form = calls.form(tool)
            schema = {"type": "object", **form.schema}  # a schema may leave its type out
            self.forms.append((of(form.begin), schema, of(form.end)))


def can_force(syntax: AnswerSyntax) -> bool:
    """Returns whether a grammar can make the model write calls: where arguments are JSON."""
    return syntax.calls is not None and syntax.calls.frame is not None
