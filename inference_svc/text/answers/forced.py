"""Calls that an answer has to make, and thoughts before them, as a grammar has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict

from inference_svc.grammars.calls import Call, Calls
from inference_svc.grammars.parts import Part
from inference_svc.grammars.thoughts import ThoughtParts
from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.chat import Tool


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


def calls_of(
    syntax: AnswerSyntax,
    tools: Sequence[Tool],
    token_of: Callable[[str], int | None],
    max_calls: int = 0,
) -> Calls:
    """Returns calls of one or more of the `tools`, at most `max_calls` (0: any number). See Cutter
    for `token_of`."""
    assert syntax.calls is not None, "tools are refused without a syntax of calls"
    frame, of = syntax.calls.frame, Cutter(syntax, token_of).parts
    style = None
    if frame.arguments is not None:
        style = {name: of(text) for name, text in asdict(frame.arguments).items()}
    calls = []
    for tool in tools:
        form = syntax.calls.form(tool)
        schema = {"type": "object", **form.schema}  # a schema may leave its type out
        calls.append(Call(of(form.begin), schema, of(form.end), style))
    separator = None if frame.separator is None else of(frame.separator)
    return Calls(calls, of(frame.begin), separator, of(frame.end), max_calls, frame.is_json)
