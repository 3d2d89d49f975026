"""Calls that an answer has to make, as the source of a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.answers.syntax import Thoughts
from inference_svc.text.chat import Tool

Part = str | int
Form = tuple[Sequence[Part], dict[str, object], Sequence[Part]]


class ForcedCalls:
    """The only texts that an answer may have: calls of one or more of the `tools`, in a syntax that
    a grammar can write. `token_of` returns the id of a marker that is a special token, and None for
    one that ends answers, which is left out; a marker that is a text raises KeyError."""

    def __init__(
        self, syntax: AnswerSyntax, tools: Sequence[Tool], token_of: Callable[[str], int | None]
    ) -> None:
        calls = syntax.calls
        assert calls is not None, "can_force has said so"
        assert calls.frame is not None, "can_force has said so"
        self._markers = syntax.specials(calls=True, thoughts=True)
        self._token_of = token_of
        frame = calls.frame
        self.begin, self.end = self._parts(frame.begin), self._parts(frame.end)
        self.separator = self._parts(frame.separator) if frame.separator else None
        self.forms: list[Form] = []
        for tool in tools:
            form = calls.form(tool)
            self.forms.append((self._parts(form.begin), dict(form.schema), self._parts(form.end)))
        self.thoughts = self._thoughts(syntax.thoughts, frame.after_thoughts)

    def _thoughts(
        self, thoughts: Thoughts | None, after: str
    ) -> tuple[Sequence[Part], Sequence[Part], Sequence[Part]] | None:
        end = [] if thoughts is None else self._parts(thoughts.end)
        if thoughts is None or len(end) != 1:  # an end of answers ends no thoughts
            return None
        return self._parts(thoughts.begin), end, self._parts(after)

    def _parts(self, text: str) -> list[Part]:
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


def can_force(syntax: AnswerSyntax) -> bool:
    """Returns whether a grammar can make the model write calls: where arguments are JSON."""
    return syntax.calls is not None and syntax.calls.frame is not None
