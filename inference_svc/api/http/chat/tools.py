"""Tools as OpenAI's API writes them, and calls of them in answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from inference_svc.api.http.request import Body
from inference_svc.api.tools import (
    AUTO,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    checked_tools,
    schema_text,
)
from inference_svc.text.answers.scanner import CallPiece
from inference_svc.text.chat import NO_PARAMETERS, Tool


class FunctionItem(Body):
    """A function. `strict` has no effect: the model decides on the arguments that it writes."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: Annotated[str, PlainValidator(schema_text)] = NO_PARAMETERS
    strict: bool | None = None


class ToolItem(Body):
    type: Literal["function"]
    function: FunctionItem


Tools = Annotated[list[ToolItem], Field(fail_fast=True), Field(max_length=MAX_TOOLS)]


def to_tools(items: Sequence[ToolItem]) -> tuple[Tool, ...]:
    """Raises InvalidArgument."""
    found = [
        Tool(
            item.function.name,
            item.function.description or "",
            item.function.parameters,
        )
        for item in items
    ]
    return checked_tools(found, "")


class Choice(NamedTuple):
    """The choice among tools; with a name it is the one to call."""

    kind: str = AUTO
    name: str = ""


def to_choice(value: object) -> Choice | None:
    """Accepts one of OpenAI's words, or the name of a function in its object."""
    if value is None:
        return None
    if value in (AUTO, NONE, REQUIRED):
        return Choice(str(value))
    if isinstance(value, dict) and value.keys() == {"type", "function"}:
        function = value["function"]
        if value["type"] == "function" and isinstance(function, dict):
            name = function.get("name")
            if isinstance(name, str) and function.keys() == {"name"}:
                return Choice("", name)
    raise ValueError(
        'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    )


class Calls:
    """The calls of one answer, joined."""

    def __init__(self) -> None:
        self._pieces: list[list[CallPiece]] = []

    def add(self, pieces: Iterable[CallPiece]) -> None:
        for piece in pieces:
            if piece.index == len(self._pieces):
                self._pieces.append([])
            self._pieces[piece.index].append(piece)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the calls in OpenAI's form, with the errors of those that have one."""
        return [
            _to_json(
                CallPiece(
                    index,
                    pieces[0].name,
                    pieces[0].call_id,
                    "".join(piece.arguments for piece in pieces),
                    pieces[-1].error,
                )
            )
            for index, pieces in enumerate(self._pieces)
        ]


def to_deltas(pieces: Iterable[CallPiece]) -> list[dict[str, Any]]:
    """Returns pieces of calls as OpenAI streams them: a call's first one has its id and name."""
    return [{"index": piece.index, **_to_json(piece)} for piece in pieces]


def _to_json(piece: CallPiece) -> dict[str, Any]:
    function: Mapping[str, str] = {"arguments": piece.arguments}
    identity: dict[str, Any] = {}
    if piece.name:
        identity = {"id": piece.call_id, "type": "function"}
        function = {"name": piece.name, **function}
    error = {"arguments_error": piece.error} if piece.error else {}
    return {**identity, "function": function, **error}
