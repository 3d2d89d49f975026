"""Converts prompts of every form, of messages whose counts are within `bounds`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from google.protobuf import struct_pb2

from inference_svc.api.generate_call import (
    EFFORTS,
    MAX_ID_CHARS,
    MAX_MESSAGE_NAME_CHARS,
    MAX_TOOL_CALL_ID_CHARS,
    MAX_TOOL_CALLS,
    checked_chat,
    checked_message,
    checked_variables,
)
from inference_svc.api.tools import (
    AUTO,
    MAX_TOOLS_CHARS,
    NONE,
    REQUIRED,
    ReadingOptions,
    checked_tools,
    schema_text,
    to_options,
)
from inference_svc.pictures.uploads import HASH_BYTES
from inference_svc.text.chat import ChatMessage, MessageImage, Tool, ToolCall, Variable
from inference_svc.text.prompt import Prompt, Text
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument

_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: AUTO,
    pb.TOOL_CHOICE_AUTO: AUTO,
    pb.TOOL_CHOICE_NONE: NONE,
    pb.TOOL_CHOICE_REQUIRED: REQUIRED,
}


def check(holds: bool, field: str, requirement: str) -> None:
    """Raises InvalidArgument, naming the field."""
    if not holds:
        raise InvalidArgument(f"{field} must be {requirement}", subject=field)


def checked_salt(salt: str, field: str = "cache_salt") -> str:
    """Returns the salt. Raises InvalidArgument, naming the field."""
    check(len(salt) <= MAX_ID_CHARS, field, f"at most {MAX_ID_CHARS} long")
    return salt


def from_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, reading: ReadingOptions | None = None
) -> Prompt:
    """Returns the prompt, with the tools that its answers may call. Raises InvalidArgument, naming
    the field."""
    kind: str | None = request.WhichOneof("prompt")
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
    if kind == "text":
        return Text(request.text, adds is not False)
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        check(not adds, "add_special_tokens", "false for token ids, to which nothing is added")
        return tuple(request.token_ids.ids)
    if kind == "chat":
        chat = request.chat
        check(bool(chat.messages), "chat", "at least one message")
        prompts = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
        checked = checked_chat(
            tuple(_from_message(m, i) for i, m in enumerate(chat.messages)),
            prompts,
            chat.continue_final_message,
            bool(adds),
            "chat.",
            () if reading is None else reading.tools,
        )
        variables, effort = _from_variables(chat), _from_effort(chat)
        return replace(checked, variables=variables, reasoning_effort=effort)
    kinds = "text, chat" if isinstance(request, pb.TokenizeRequest) else "text, token_ids, chat"
    raise InvalidArgument(f"prompt is missing: one of {kinds}", subject="prompt")


def from_tokenize_request(request: pb.TokenizeRequest) -> Prompt:
    """Returns the prompt to tokenise. Raises InvalidArgument, naming the field."""
    reading = from_chat(request.chat) if request.WhichOneof("prompt") == "chat" else None
    return from_prompt(request, reading)


def _from_variables(chat: pb.ChatMessages) -> dict[str, Variable]:
    field = "chat.chat_template_kwargs"
    try:
        return checked_variables({k: _value(v) for k, v in chat.chat_template_kwargs.items()})
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}", subject=field) from None


def _value(value: struct_pb2.Value) -> object:
    """Returns a value; numbers are doubles, of which whole ones stand for integers."""
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    known = ("bool_value", "string_value")
    return (
        None if kind in (None, "null_value") else getattr(value, kind) if kind in known else value
    )


def _from_effort(chat: pb.ChatMessages) -> str:
    effort = chat.reasoning_effort
    check(effort in ("", *EFFORTS), "chat.reasoning_effort", f"one of {', '.join(EFFORTS)}")
    return effort


def from_chat(chat: pb.ChatMessages) -> ReadingOptions:
    """Returns how the answers to a chat are read. Raises InvalidArgument, naming the field."""
    choice = _CHOICES.get(chat.tool_choice)
    if choice is None:
        raise InvalidArgument(
            f"chat.tool_choice must be AUTO, NONE or REQUIRED, not {chat.tool_choice}",
            subject="chat.tool_choice",
        )
    tools = [_from_tool(tool, f"chat.tools[{i}].parameters") for i, tool in enumerate(chat.tools)]
    return to_options(
        checked_tools(tools, "chat."),
        choice,
        name=chat.required_tool,
        is_parallel=not chat.single_tool_call,
        has_thoughts=chat.separate_reasoning,
        path="chat.",
        budget=chat.thinking_token_budget if chat.HasField("thinking_token_budget") else None,
    )


def _from_tool(tool: pb.Tool, field: str) -> Tool:
    check(len(tool.parameters) <= MAX_TOOLS_CHARS, field, f"at most {MAX_TOOLS_CHARS} long")
    try:
        parameters = schema_text(json.loads(tool.parameters) if tool.parameters else None)
    except RecursionError:
        raise InvalidArgument(f"{field}: is nested too deeply", subject=field) from None
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}", subject=field) from None
    return Tool(tool.name, tool.description, parameters)


def _from_message(message: pb.ChatMessage, index: int) -> ChatMessage:
    path = f"chat.messages[{index}]"
    check(
        len(message.name) <= MAX_MESSAGE_NAME_CHARS,
        f"{path}.name",
        f"at most {MAX_MESSAGE_NAME_CHARS} long",
    )
    check(
        len(message.tool_call_id) <= MAX_TOOL_CALL_ID_CHARS,
        f"{path}.tool_call_id",
        f"at most {MAX_TOOL_CALL_ID_CHARS} long",
    )
    check(
        len(message.tool_calls) <= MAX_TOOL_CALLS,
        f"{path}.tool_calls",
        f"at most {MAX_TOOL_CALLS}",
    )
    return checked_message(
        ChatMessage(
            message.role,
            message.content,
            message.reasoning,
            tuple(
                _from_tool_call(call, f"{path}.tool_calls[{place}]")
                for place, call in enumerate(message.tool_calls)
            ),
            message.tool_call_id,
            message.name,
            tuple(_images(message, path)),
        ),
        path,
    )


def _images(message: pb.ChatMessage, path: str) -> Iterator[MessageImage]:
    """Yields the images of a message."""
    before = 0
    for index, image in enumerate(message.images):
        where = f"{path}.images[{index}]"
        is_placed = before <= image.position <= len(message.content)
        check(is_placed, f"{where}.position", "in order, and within the content")
        before = image.position
        kind: str | None = image.WhichOneof("file")
        if kind is None:
            raise InvalidArgument(f"{where}: one of data, sha256 is missing", subject=where)
        if kind == "sha256":
            where = f"{where}.sha256"
            check(len(image.sha256) == HASH_BYTES, where, f"a hash of {HASH_BYTES} bytes")
        yield MessageImage(image.position, image.data, where, image.sha256)


def _from_tool_call(call: pb.ToolCall, path: str) -> ToolCall:
    check(
        1 <= len(call.name) <= MAX_MESSAGE_NAME_CHARS,
        f"{path}.name",
        f"of 1 to {MAX_MESSAGE_NAME_CHARS} characters",
    )
    check(
        len(call.id) <= MAX_TOOL_CALL_ID_CHARS,
        f"{path}.id",
        f"at most {MAX_TOOL_CALL_ID_CHARS} long",
    )
    return ToolCall(call.name, call.arguments, call.id)
