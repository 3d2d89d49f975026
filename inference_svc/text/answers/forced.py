"""Calls that an answer has to make: the request to a grammar engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.answers.syntax import CallForm, CallFrame, Thoughts
from inference_svc.text.chat import Tool


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The only texts that an answer may have: `frame.begin`, one of the `forms`, up to `max_calls`
    of them (0: any number) with `frame.separator` between, and `frame.end`. In a form the text
    between its begin and its end is a JSON value that matches its schema. With `thoughts` all that
    may come after the thoughts, which are free. Markers among the texts may be special tokens."""

    frame: CallFrame
    forms: tuple[CallForm, ...]
    max_calls: int
    thoughts: Thoughts | None


def forced_calls(
    syntax: AnswerSyntax, tools: Sequence[Tool], max_calls: int = 0
) -> ForcedCalls | None:
    """Returns calls of one or more of the tools in a syntax; None where no grammar can make the
    model write them, because arguments are no JSON there."""
    calls = syntax.calls
    if calls is None or calls.frame is None:
        return None
    most = max_calls if calls.frame.separator else 1
    return ForcedCalls(calls.frame, tuple(map(calls.form, tools)), most, syntax.thoughts)
