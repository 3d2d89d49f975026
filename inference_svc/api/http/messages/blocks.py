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
from inference_svc.api.http.chat.images import decoded, to_image
from inference_svc.api.http.request import Body
from inference_svc.text.chat import ChatMessage, MessageImage, ToolCall

SEPARATOR = "\n\n"
"""Between the texts of one message, unless an image is there."""
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


class UrlSource(Body):
    type: Literal["url"]
    url: str


class ImageSource(Body):
    """The bytes of an image. Its media type has no effect: the file itself shows its type."""

    type: Literal["base64"]
    data: str

    media_type: Annotated[str, Field(pattern=r"^image/[\w.+-]{1,64}$")]


def _to_source(value: object) -> object:
    """Refuses images of files by name."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "file":
        raise ValueError(
            'the type must be "base64" or "url", not "file": the server takes no files over HTTP, '
            "so send the image itself"
        )
    return value


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[
        ImageSource | UrlSource, Field(discriminator="type"), BeforeValidator(_to_source)
    ]

    cache_control: Anything | None = None


Parts = Annotated[
    list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
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
    content: Parts | None = None

    is_error: bool | None = None
    cache_control: Anything | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | CallBlock | ResultBlock, Field(discriminator="type")
]


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
    roles = {
        ThinkingBlock: "assistant",
        CallBlock: "assistant",
        ResultBlock: "user",
        ImageBlock: "user",
    }
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
    """Yields the messages of a conversation: of a user's, results come apart from texts and images.
    Raises InvalidArgument, naming an image that is none."""
    for index, message in enumerate(messages):
        if message.role == "assistant":
            yield _of_assistant(message.content)
            continue
        parts: list[tuple[str, TextBlock | ImageBlock]] = []
        for place, block in enumerate(message.content):
            field = f"messages[{index}].content[{place}]"
            if isinstance(block, ResultBlock):
                if parts:
                    yield _of_parts(message.role, parts)
                    parts = []
                inner = [(f"{field}.content[{i}]", p) for i, p in enumerate(block.content or ())]
                yield _of_parts("tool", inner, block.tool_use_id)
            elif isinstance(block, TextBlock | ImageBlock):
                parts.append((field, block))
        if parts or not message.content:
            yield _of_parts(message.role, parts)


def _of_parts(
    role: str, parts: Sequence[tuple[str, TextBlock | ImageBlock]], tool_call_id: str = ""
) -> ChatMessage:
    """Returns the message of texts and images, each with its field."""
    text, images, has_text_before = "", [], False
    for field, block in parts:
        if isinstance(block, ImageBlock):
            images.append(_image(block.source, len(text), f"{field}.source"))
            has_text_before = False
            continue
        text += SEPARATOR * has_text_before + block.text
        has_text_before = True
    return ChatMessage(role, text, tool_call_id=tool_call_id, images=tuple(images))


def _image(source: ImageSource | UrlSource, place: int, field: str) -> MessageImage:
    """Raises InvalidArgument, naming a part of the field."""
    if isinstance(source, UrlSource):
        return to_image(place, source.url, f"{field}.url")
    where = f"{field}.data"
    return MessageImage(place, decoded(source.data, where), where)


def _of_assistant(blocks: Sequence[Block]) -> ChatMessage:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return ChatMessage(
        "assistant",
        text_of([block for block in blocks if isinstance(block, TextBlock)]),
        SEPARATOR.join(thoughts),
        tuple(block.to_call() for block in blocks if isinstance(block, CallBlock)),
    )
