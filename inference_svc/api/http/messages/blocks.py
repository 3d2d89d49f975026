"""The blocks of messages, and the conversation that they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from inference_svc.api.generate_call import (
    MAX_MESSAGE_NAME_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_CALL_ID_CHARS,
)
from inference_svc.api.http.request import Body
from inference_svc.text.chat import ChatMessage, ToolCall

SEPARATOR = "\n\n"
"""Between the texts of one message."""
MAX_SIGNATURE_CHARS = 1 << 16
_CallId = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_CALL_ID_CHARS)]
Anything = Annotated[dict[str, Any], Field(max_length=16)]
"""Accepted without effect: hints for a cache, which is automatic here, and the like."""


def _to_blocks(value: object) -> object:
    """A text is a block of its own."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Body):
    type: Literal["text"]
    text: str

    cache_control: Anything | None = None
    citations: Annotated[list[Any], Field(max_length=1024)] | None = None


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(_to_blocks),
]


class ThinkingBlock(Body):
    """Signatures are not checked: the server has no secret of its own to sign with."""

    type: Literal["thinking"]
    thinking: str

    signature: Annotated[str, Field(max_length=MAX_SIGNATURE_CHARS)] | None = None


class CallBlock(Body):
    """`input_text` are the arguments as the model wrote them, where they are no JSON object."""

    type: Literal["tool_use"]
    id: _CallId
    name: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_NAME_CHARS)]
    input: dict[str, Any]
    input_text: str | None = None

    input_error: str | None = None
    cache_control: Anything | None = None
    caller: Anything | None = None

    def to_call(self) -> ToolCall:
        arguments = self.input_text
        if arguments is None:
            arguments = json.dumps(self.input, ensure_ascii=False)
        return ToolCall(self.name, arguments, self.id)


class ResultBlock(Body):
    """`is_error` changes nothing: chat templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: _CallId
    content: Texts | None = None

    is_error: bool | None = None
    cache_control: Anything | None = None


Block = Annotated[TextBlock | ThinkingBlock | CallBlock | ResultBlock, Field(discriminator="type")]


class BlockMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(fail_fast=True, max_length=MAX_MESSAGES),
        BeforeValidator(_to_blocks),
    ]


def text_of(texts: Sequence[TextBlock] | None) -> str:
    return SEPARATOR.join(each.text for each in texts or ())


def misplaced(messages: Sequence[BlockMessage]) -> tuple[str, str] | None:
    """Returns the field of the first block that a message of its role cannot have, and that role;
    None if there is none."""
    roles = {ThinkingBlock: "assistant", CallBlock: "assistant", ResultBlock: "user"}
    for index, message in enumerate(messages):
        for place, block in enumerate(message.content):
            role = roles.get(type(block), message.role)
            if role != message.role:
                return f"messages[{index}].content[{place}]", role
    return None


def result_ids(messages: Sequence[BlockMessage]) -> Iterator[tuple[str, list[str], str]]:
    """Yields each block as `check_results` takes it."""
    for index, message in enumerate(messages):
        for place, block in enumerate(message.content):
            field = f"messages[{index}].content[{place}].tool_use_id"
            calls = [block.id] if isinstance(block, CallBlock) else []
            yield field, calls, block.tool_use_id if isinstance(block, ResultBlock) else ""


def to_messages(messages: Sequence[BlockMessage]) -> Iterator[ChatMessage]:
    """Yields the messages of a conversation: of a user's, results come apart from texts."""
    for message in messages:
        if message.role == "assistant":
            yield _of_assistant(message.content)
            continue
        texts: list[TextBlock] = []
        for block in message.content:
            if isinstance(block, ResultBlock):
                if texts:
                    yield ChatMessage(message.role, text_of(texts))
                    texts = []
                yield ChatMessage("tool", text_of(block.content), tool_call_id=block.tool_use_id)
            elif isinstance(block, TextBlock):
                texts.append(block)
        if texts or not message.content:
            yield ChatMessage(message.role, text_of(texts))


def _of_assistant(blocks: Sequence[Block]) -> ChatMessage:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return ChatMessage(
        "assistant",
        text_of([block for block in blocks if isinstance(block, TextBlock)]),
        SEPARATOR.join(thoughts),
        tuple(block.to_call() for block in blocks if isinstance(block, CallBlock)),
    )
