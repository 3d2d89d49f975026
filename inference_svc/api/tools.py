"""Tools of a request: their checks, the choice among them, and the readers of its answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.frontend.output_stream import Delta
from inference_svc.text.answers.families import AnswerReader, AnswerSyntax
from inference_svc.text.answers.scanner import Piece, Said, Thought
from inference_svc.text.chat import NO_PARAMETERS, Tool
from servicekit.errors import InvalidArgument

SLICE_CHARS = 4096
"""Characters of an answer that are read before other requests may run."""
MAX_TOOLS = 128
"""OpenAI's bound."""
MAX_TOOL_NAME_CHARS = 64
MAX_NAMES_SHOWN = 8
"""Names of tools in one message."""
MAX_TOOLS_CHARS = 1 << 18
"""All tools of a request together: about 64,000 tokens."""
MAX_SCHEMA_DEPTH = 32
"""Objects and lists within one another, in the parameters of a tool."""
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")
OBJECT = "object"
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How the answers to a chat are read. `tools` may be called, at most `max_calls` times (0: as
    often as the model likes); one of `forced` has to be. With `has_thoughts` thoughts are apart
    from the text, which `is_thinking` begins with; they have at most `budget` tokens, if it is set.
    `path` is before the caller's field names, and `schema_path` is the name of a schema after its
    tool's, in the list of all that the caller has `listed`."""

    tools: tuple[Tool, ...] = ()
    max_calls: int = 0
    forced: tuple[Tool, ...] = ()
    has_thoughts: bool = False
    is_thinking: bool = False
    path: str = ""
    schema_path: str = ".parameters"
    budget: int | None = None
    budget_name: str = "thinking_token_budget"
    listed: tuple[Tool, ...] = ()

    @property
    def budget_field(self) -> str:
        return f"{self.path}{self.budget_name}"

    @property
    def choice_field(self) -> str:
        return f"{self.path}tool_choice"

    def check(self, syntax: AnswerSyntax) -> None:
        """Raises InvalidArgument for tools whose calls cannot be read, and for a bound on thoughts
        where there are none."""
        if self.budget is not None and syntax.thoughts is None:
            raise InvalidArgument(
                f"{self.budget_field}: the server finds no thoughts in this chat template: leave "
                "it out, or use a model that thinks",
                subject=self.budget_field,
            )
        if self.tools and syntax.calls is None:
            field = f"{self.path}tools"
            raise InvalidArgument(
                f"{field}: the server finds no syntax of calls in this chat template: use an "
                'adapter or a model whose template has one, or tool_choice "none"; an operator can '
                "choose a parser with --tool-parser",
                subject=field,
            )

    def reads(self, syntax: AnswerSyntax) -> bool:
        """Returns whether there is anything to read in answers."""
        has_thoughts = self.has_thoughts and syntax.thoughts is not None
        return bool(self.tools) or has_thoughts or self.budget is not None

    def specials(self, syntax: AnswerSyntax, *, has_form: bool) -> tuple[str, ...]:
        """Returns the markers that readers look for, and that may be special tokens."""
        calls = bool(self.tools)
        return syntax.specials(calls=calls, thoughts=self.has_thoughts or (calls and has_form))

    def starts_thinking(self, syntax: AnswerSyntax, prompt: str) -> bool:
        """Returns whether an answer to a prompt, of which this is the end, begins with thoughts."""
        return self.is_thinking or syntax.begins_thoughts(prompt)

    def schema_fields(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Returns the caller's names of the schemas of some of its tools."""
        places = map(self.listed.index, tools)
        return tuple(f"{self.path}tools[{place}]{self.schema_path}" for place in places)

    def readers(
        self, syntax: AnswerSyntax, prompts: Sequence[str], *, has_form: bool
    ) -> list[AnswerReader]:
        """Returns a reader for each answer, whose prompts end with these texts."""
        return [
            AnswerReader(
                syntax,
                self.tools,
                self.max_calls,
                has_thoughts=self.has_thoughts,
                starts_thinking=self.starts_thinking(syntax, prompt),
                has_form=has_form,
            )
            for prompt in prompts
        ]


async def read_delta(reader: AnswerReader, delta: Delta) -> None:
    """Divides a delta's text into text, thoughts and calls; lets the event loop run others while it
    reads a long one."""
    text = delta.text
    pieces: list[Piece] = []
    while len(text) > SLICE_CHARS:
        pieces += reader.push(text[:SLICE_CHARS])
        text = text[SLICE_CHARS:]
        await asyncio.sleep(0)
    pieces += reader.push(text, is_last=delta.finish_reason is not None)
    delta.text = "".join(each.text for each in pieces if isinstance(each, Said))
    delta.thoughts = "".join(each.text for each in pieces if isinstance(each, Thought))
    delta.calls = [each for each in pieces if not isinstance(each, Said | Thought)]
    delta.pieces = pieces


# --- checks -------------------------------------------------------------------------------------


def checked_tools(tools: Sequence[Tool], path: str) -> tuple[Tool, ...]:
    """Returns the tools of a request, whose fields the caller knows by `path`. Raises
    InvalidArgument naming the field."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"{path}tools[{index}]"
        if _NAME.fullmatch(tool.name) is None:
            raise InvalidArgument(
                f"{field}: the name of a tool has 1 to {MAX_TOOL_NAME_CHARS} letters, digits, "
                f"'_', '-' and '.', not {tool.name[:MAX_TOOL_NAME_CHARS]!a}",
                subject=field,
            )
        if tool.name in names:
            raise InvalidArgument(f"{field}: {tool.name} is there twice", subject=field)
        names.add(tool.name)
    num_chars = sum(tool.num_chars for tool in tools)
    if num_chars > MAX_TOOLS_CHARS:
        raise InvalidArgument(
            f"{path}tools: {num_chars} characters are more than {MAX_TOOLS_CHARS}",
            subject=f"{path}tools",
        )
    return tuple(tools)


def schema_text(found: object) -> str:
    """Returns the schema of a tool's parameters as a text; None means that it has none. Raises
    ValueError."""
    if found is None:
        return NO_PARAMETERS
    if not isinstance(found, dict):
        raise ValueError("must be an object, a JSON schema")
    if found.get("type", OBJECT) != OBJECT:
        raise ValueError(f'must have the type "{OBJECT}": the arguments of a call are one')
    if _depth(found) > MAX_SCHEMA_DEPTH:
        raise ValueError(f"must have at most {MAX_SCHEMA_DEPTH} objects and lists within another")
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    text.encode()  # no halves of characters
    return text


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            break
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def to_options(
    tools: tuple[Tool, ...],
    choice: str,
    *,
    name: str = "",
    allowed: Sequence[str] = (),
    is_parallel: bool = True,
    has_thoughts: bool = False,
    is_thinking: bool = False,
    path: str = "",
    schema_path: str = ".parameters",
    budget: int | None = None,
    budget_name: str = "thinking_token_budget",
) -> ReadingOptions:
    """Returns the options of a request. `choice` is AUTO, NONE, REQUIRED, or "" with the `name` of
    the tool that is to be called. If some are `allowed`, the others might as well not be there.
    Raises InvalidArgument naming the field."""
    field = f"{path}tool_choice"
    offered = () if choice == NONE else tools
    if allowed:
        offered = tuple(dict.fromkeys(_named(each, tools, field) for each in allowed))
    forced = offered if choice == REQUIRED else ()
    if name:
        forced = (_named(name, tools, field),)
    if choice == REQUIRED and not tools:
        raise InvalidArgument(f"{field}: must not be required without tools", subject=field)
    max_calls = 0 if is_parallel and not name else 1
    return ReadingOptions(
        offered,
        max_calls,
        forced,
        has_thoughts,
        is_thinking,
        path,
        schema_path,
        budget,
        budget_name,
        tools,
    )


def _named(name: str, tools: Sequence[Tool], field: str) -> Tool:
    """Returns the tool of this name. Raises InvalidArgument naming the field."""
    for tool in tools:
        if tool.name == name:
            return tool
    shown = ", ".join(tool.name for tool in tools[:MAX_NAMES_SHOWN])
    more = ", ..." if len(tools) > MAX_NAMES_SHOWN else ""
    raise InvalidArgument(
        f"{field}: {name[:MAX_TOOL_NAME_CHARS]!a} is none of the tools: "
        f"{shown or 'there are none'}{more}",
        subject=field,
    )
