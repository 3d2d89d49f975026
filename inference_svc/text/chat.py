"""A conversation: its messages, the calls of tools in them, and what it is rendered with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from inference_svc.pictures.fetching.hosts import Location

CALL_CHARS = 60
"""The approximate length that a chat template adds to each call of a tool."""
TEMPLATE_CHARS = 20
"""The approximate length that it adds to each message."""


Variable: TypeAlias = bool | int | float | str | None
"""A value of an argument of a chat template."""
NO_PARAMETERS = '{"type": "object", "properties": {}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call; `parameters` is its schema, the text of a JSON object."""

    name: str
    description: str = ""
    parameters: str = NO_PARAMETERS

    @property
    def num_chars(self) -> int:
        """The approximate length that it has in a prompt."""
        return len(self.name) + len(self.description) + len(self.parameters) + CALL_CHARS

    @property
    def schema(self) -> dict[str, Any]:
        found = json.loads(self.parameters)
        assert isinstance(found, dict), "a tool's parameters are checked"
        return found

    def to_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant has made. `arguments` is a text as the model wrote it: JSON, unless
    the model erred."""

    name: str
    arguments: str
    call_id: str = ""

    @property
    def found(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are none. No text is no arguments: clients join
        the pieces of a call's stream, and some servers send none for it."""
        try:
            found = json.loads(self.arguments or "{}")
            # No halves of characters, and no number that is too large.
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def to_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates read: with the arguments as an object,
        or as the text that they are if they are none."""
        found = self.found
        function = {"name": self.name, "arguments": self.arguments if found is None else found}
        identity = {"id": self.call_id} if self.call_id else {}
        return {**identity, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class MessageImage:
    """An image in a message: before the character `place` of its text. `data` is a file, which its
    sender calls `where`; or the sender has uploaded it, and names it by its `sha256`; or it is at a
    `location`, and has not been fetched."""

    place: int
    data: bytes | memoryview = field(repr=False)
    where: str
    sha256: bytes = b""
    location: Location | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`reasoning` and `tool_calls` are an assistant's; `tool_call_id` and `name` belong to the
    result of a call. A user's may have `images`, in order."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    images: tuple[MessageImage, ...] = ()

    @property
    def num_chars(self) -> int:
        """The approximate length that it has in a prompt."""
        calls = sum(len(c.name) + len(c.arguments) + CALL_CHARS for c in self.tool_calls)
        texts = len(self.role) + len(self.content) + len(self.reasoning)
        return texts + len(self.tool_call_id) + len(self.name) + calls + TEMPLATE_CHARS

    def to_template(self, reasoning_field: str, *, in_parts: bool = False) -> dict[str, Any]:
        """Returns the message in the form that chat templates read, its content as a text or
        `in_parts`. Fields that it has not are absent, because templates ask for them so."""
        content = self.parts() if in_parts else self.content
        found: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning and reasoning_field:
            found[reasoning_field] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id:
            found["tool_call_id"] = self.tool_call_id
        if self.name:
            found["name"] = self.name
        return found

    def parts(self) -> list[dict[str, str]]:
        """Returns the content as a list of texts and images."""
        found: list[dict[str, str]] = []
        start = 0
        for place in (*(image.place for image in self.images), None):
            text = self.content[start:place]
            if text or not (self.images or found):
                found.append({"type": "text", "text": text})
            if place is not None:
                found.append({"type": "image"})
                start = place
        return found


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. With `continue_final_message` the answer continues its last message, and
    without `add_generation_prompt` nothing follows its last message."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """In addition to those that the chat template writes."""
    tools: tuple[Tool, ...] = ()
    """The tools that the template shows to the model."""
    variables: Mapping[str, Variable] = field(default_factory=dict)
    """Arguments of the template's own."""
    reasoning_effort: str = ""
    may_lack_effort: bool = False
    """A template that knows no effort is rendered without it."""

    @property
    def num_chars(self) -> int:
        """The approximate length that it has in a prompt."""
        tools = sum(tool.num_chars for tool in self.tools)
        return tools + sum(message.num_chars for message in self.messages)

    @property
    def images(self) -> tuple[MessageImage, ...]:
        """The images of all messages, in order."""
        return tuple(image for message in self.messages for image in message.images)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` makes the conversation of, but for the files of images."""
        return {
            "messages": [
                [
                    *(m.role, m.content, m.reasoning, _calls_to_json(m), m.tool_call_id, m.name),
                    [[image.place, image.where] for image in m.images],
                ]
                for m in self.messages
            ],
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "variables": dict(self.variables),
            "reasoning_effort": self.reasoning_effort,
            "may_lack_effort": self.may_lack_effort,
            "tools": [[tool.name, tool.description, tool.parameters] for tool in self.tools],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Chat:
        return cls(
            tuple(
                ChatMessage(
                    role,
                    content,
                    reasoning,
                    _calls_from_json(calls),
                    call_id,
                    name,
                    tuple(MessageImage(place, b"", where) for place, where in images),
                )
                for role, content, reasoning, calls, call_id, name, images in found["messages"]
            ),
            add_generation_prompt=found["add_generation_prompt"],
            continue_final_message=found["continue_final_message"],
            tools=tuple(Tool(*each) for each in found["tools"]),
            variables=found["variables"],
            reasoning_effort=found["reasoning_effort"],
            may_lack_effort=found["may_lack_effort"],
        )


def _calls_to_json(message: ChatMessage) -> list[list[str]]:
    return [[call.name, call.arguments, call.call_id] for call in message.tool_calls]


def _calls_from_json(found: list[list[str]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(*each) for each in found)
