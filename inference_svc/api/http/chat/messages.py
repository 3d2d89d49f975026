"""Messages as OpenAI's API and its clients write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import (
    MAX_MESSAGE_NAME_CHARS,
    MAX_TOOL_CALL_ID_CHARS,
    MAX_TOOL_CALLS,
    checked_message,
)
from inference_svc.api.http.chat.images import DETAILS, Content, ImageUrl
from inference_svc.api.http.generation_body import Ignored
from inference_svc.api.http.request import Body
from inference_svc.text.chat import ChatMessage, ToolCall
from servicekit.errors import InvalidArgument

MAX_KIND_CHARS = 64
"""How much of a part's type an error quotes."""
MAX_ANNOTATIONS = 1024

_HINTS = {"cache_control"}
"""Keys of a part without effect, which LiteLLM and OpenRouter pass: prefixes are cached anyway."""
_Anything = Annotated[list[Any], Field(max_length=MAX_ANNOTATIONS)]
_Others = Annotated[dict[str, Any], Field(max_length=MAX_ANNOTATIONS)]
"""Fields of others, such as signatures of their models' thoughts."""


def _to_content(value: object) -> Content | None:
    """Joins the texts of parts."""
    if value is None:
        return None
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    text, images = "", []
    for index, part in enumerate(value):
        url = _to_url(part)
        if url is None:
            text += _to_part(part)
        else:
            images.append(ImageUrl(len(text), f"content[{index}].image_url", url))
    return Content(text, tuple(images))


def _to_url(value: object) -> str | None:
    """Returns the URL of an image; None for another part."""
    if not isinstance(value, dict) or value.get("type") != "image_url":
        return None
    found = value.get("image_url")
    is_known = value.keys() - _HINTS == {"type", "image_url"}
    if is_known and isinstance(found, dict) and found.keys() <= {"url", "detail"}:
        url, detail = found.get("url"), found.get("detail")
        if isinstance(url, str) and detail in (None, *DETAILS):
            return url
    details = ", ".join(DETAILS)
    raise ValueError(
        'an image must be {"type": "image_url", "image_url": {"url": "data:image/..."}}, with '
        f"detail {details} or none"
    )


def _to_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and value.keys() - _HINTS == {"type", "text"}:
        text = value["text"]
        if kind == "text" and isinstance(text, str):
            return text
    found = f", not {kind[:MAX_KIND_CHARS]}" if isinstance(kind, str) and kind != "text" else ""
    raise ValueError(
        'a part must be {"type": "text", "text": ...} or an image_url: only text and images are '
        f"supported{found}"
    )


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_NAME_CHARS)]
    arguments: str

    # Accepted, without effect.
    parsed_arguments: Any = None  # of OpenAI's helpers for streams
    provider_specific_fields: _Others | None = None  # LiteLLM


class CalledTool(Body):
    """A call in a history: of our answers, or put together of a stream's parts."""

    function: CalledFunction
    id: Annotated[str, Field(max_length=MAX_TOOL_CALL_ID_CHARS)] | None = None

    # Accepted, without effect.
    type: Literal["function"] | None = None
    index: Annotated[int, Field(ge=0)] | None = None  # of streams: LangChain keeps it
    arguments_error: Ignored | None = None  # of our own answers
    extra_content: _Others | None = None  # Gemini's signatures: kilocode#5267
    provider_specific_fields: _Others | None = None  # LiteLLM: langchain-litellm#43

    def to_call(self) -> ToolCall:
        return ToolCall(self.function.name, self.function.arguments, self.id or "")


class Message(Body):
    """All fields of our responses are accepted back, and so are fields of others' responses that
    clients keep in their history, if they change nothing about the text."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Content | None, PlainValidator(_to_content)] = None
    reasoning_content: str | None = None  # DeepSeek, vLLM, LiteLLM: litellm#30835
    reasoning: str | None = None  # OpenRouter, vLLM: can1357/oh-my-pi#1157
    tool_calls: (
        Annotated[list[CalledTool], Field(fail_fast=True), Field(max_length=MAX_TOOL_CALLS)] | None
    ) = None
    tool_call_id: Annotated[str, Field(max_length=MAX_TOOL_CALL_ID_CHARS)] | None = None
    name: Annotated[str, Field(max_length=MAX_MESSAGE_NAME_CHARS)] | None = None

    # Accepted, without effect: templates know none.
    id: Ignored | None = None  # agents' histories: vllm#10463
    annotations: _Anything | None = None  # OpenAI's responses with web search
    reasoning_details: _Anything | None = None  # OpenRouter: Roo-Code#11429
    thinking_blocks: _Anything | None = None  # LiteLLM: litellm#32684
    provider_specific_fields: _Others | None = None  # LiteLLM
    parsed: Any = None  # OpenAI's helpers: the content, or null

    # Accepted with values that change nothing: OpenAI's responses.
    refusal: None = None
    audio: None = None
    function_call: None = None

    @property
    def known(self) -> Content | None:
        """The content; an assistant's may be empty or absent. None: it is missing."""
        is_empty = self.content is None and self.role == "assistant"
        return Content("") if is_empty else self.content


def to_messages(messages: Sequence[Message]) -> Iterator[ChatMessage]:
    """Raises InvalidArgument for a message without content that needs some, and for fields of other
    roles' messages."""
    for index, message in enumerate(messages):
        content, path = message.known, f"messages[{index}]"
        if content is None:
            field = f"messages[{index}].content"
            raise InvalidArgument(
                f"{field}: must be a text or a list of parts; only an assistant's may be missing",
                subject=field,
            )
        yield checked_message(
            ChatMessage(
                message.role,
                content.text,
                message.reasoning_content or message.reasoning or "",
                tuple(call.to_call() for call in message.tool_calls or ()),
                message.tool_call_id or "",
                message.name or "",
                tuple(image.to_image(path) for image in content.images),
            ),
            path,
        )
