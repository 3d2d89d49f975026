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

ALLOWED = "allowed_tools"
"""The type of a choice among some of the tools."""


class FunctionItem(Body):
    """A function. `strict` has no effect: the model decides on the arguments that it writes."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: Annotated[str, PlainValidator(schema_text)] = NO_PARAMETERS
    strict: bool | None = None


class ToolItem(Body):
    type: Literal["function"]
    function: FunctionItem

    # Accepted, without effect: of LiteLLM and OpenRouter, since prefixes are cached anyway.
    cache_control: Annotated[dict[str, Any], Field(max_length=16)] | None = None


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
    """The choice among tools; with a name it is the one to call. `allowed` are the names of the
    tools that there are, if it leaves others out."""

    kind: str = AUTO
    name: str = ""
    allowed: tuple[str, ...] = ()


def to_choice(value: object) -> Choice | None:
    """Accepts one of OpenAI's words, the name of a function in its object, or a list of these.
    Raises ValueError for anything else."""
    if value is None:
        return None
    if value in (AUTO, NONE, REQUIRED):
        return Choice(str(value))
    if name := _function_name(value):
        return Choice("", name)
    if isinstance(value, dict) and value.keys() == {"type", ALLOWED} and value["type"] == ALLOWED:
        found = _to_allowed(value[ALLOWED])
        if found is not None:
            return found
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
        f'"{ALLOWED}" with a mode, "auto" or "required", and a list of functions'
    )


def _function_name(value: object) -> str:
    """Returns the name in a function's object; "" for anything else."""
    if not isinstance(value, dict) or value.keys() != {"type", "function"}:
        return ""
    function = value["function"]
    is_function = value["type"] == "function" and isinstance(function, dict)
    if not is_function or function.keys() != {"name"} or not isinstance(function["name"], str):
        return ""
    return function["name"]


def _to_allowed(value: object) -> Choice | None:
    if not isinstance(value, dict) or value.keys() != {"mode", "tools"}:
        return None
    mode, tools = value["mode"], value["tools"]
    if mode not in (AUTO, REQUIRED) or not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        return None
    names = tuple(map(_function_name, tools))
    return Choice(mode, "", names) if names and all(names) else None


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
