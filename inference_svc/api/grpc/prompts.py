"""Converts prompts of every form, of messages whose counts are within `bounds`."""

from __future__ import annotations

from inference_svc.api.generate_call import (
    MAX_MESSAGE_NAME_CHARS,
    MAX_TOOL_CALL_ID_CHARS,
    MAX_TOOL_CALLS,
    checked_chat,
    checked_message,
)
from inference_svc.text.chat import ChatMessage, ToolCall
from inference_svc.text.prompt import Prompt, Text
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument


def check(holds: bool, field: str, requirement: str) -> None:
    """Raises InvalidArgument, naming the field."""
    if not holds:
        raise InvalidArgument(f"{field} must be {requirement}", subject=field)


def from_prompt(request: pb.GenerateRequest, vocab_size: int) -> Prompt:
    """Raises InvalidArgument, naming the field."""
    kind = request.WhichOneof("prompt")
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
    if kind == "text":
        return Text(request.text, adds is not False)
    if kind == "token_ids":
        check(not adds, "add_special_tokens", "false for token ids, to which nothing is added")
        ids = tuple(request.token_ids.ids)
        largest = max(ids, default=0)
        check(largest < vocab_size, "token_ids", f"below {vocab_size}; {largest} is no token")
        return ids
    if kind == "chat":
        chat = request.chat
        check(bool(chat.messages), "chat", "at least one message")
        prompts = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
        return checked_chat(
            tuple(_from_message(m, i) for i, m in enumerate(chat.messages)),
            prompts,
            chat.continue_final_message,
            bool(adds),
            "chat.",
        )
    raise InvalidArgument("prompt is missing: one of text, token_ids, chat", subject="prompt")


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
        ),
        path,
    )


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
