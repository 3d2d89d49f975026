"""Prompts of every form, and the options of a chat, as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from google.protobuf import struct_pb2

from loadout import types
from loadout._rpc.convert import from_inference
from loadout._rpc.convert.messages import build, invalid, named
from loadout.inference.v1 import inference_pb2 as inference_pb

Prompt = str | Sequence[int] | Sequence[types.ChatMessage]
"""Text, token ids, or chat messages."""

CHAT_NAMES = tuple(get_type_hints(types.ChatOptions))


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Files of images that a chat names by their hashes, for a server that lacks them."""

    files: tuple[bytes, ...]
    cache_salt: str

    @classmethod
    def of(cls, prompt: Prompt, cache_salt: str) -> ImageFiles | None:
        """Returns None if there are none. `prompt` is one that `to_prompt` takes."""
        # A prompt of many token ids is looked at once only.
        if not isinstance(next(iter(prompt), None), Mapping):
            return None
        messages = cast(Sequence[types.ChatMessage], prompt)
        images = [image for message in messages for image in message.get("images") or ()]
        files = [each["data"] for each in images if "data" in each and "sha256" in each]
        return cls(tuple(dict.fromkeys(files)), cache_salt) if files else None


def to_prompt(
    prompt: Prompt,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the prompt's field. Raises InvalidArgument for options of a chat that it is not."""
    items = [] if isinstance(prompt, str) else list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        chat = build(
            inference_pb.ChatMessages,
            "chat",
            messages=[_message(cast(dict[str, Any], item), i) for i, item in enumerate(items)],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **_chat_options(options),
        )
        return {"chat": chat}
    for name, is_set in (
        ("add_generation_prompt", add_generation_prompt is not None),
        ("continue_final_message", continue_final_message),
        *((name, _is_given(options.get(name))) for name in CHAT_NAMES),
    ):
        if is_set:
            raise invalid(name, "works only with chat messages as the prompt")
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": build(inference_pb.TokenIds, "token_ids", ids=items)}


def _is_given(value: object) -> bool:
    """Returns whether an option is more than its default; 0 is a number of its own."""
    return bool(value) or (value == 0 and value is not False)


def _chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat that its options set. Raises InvalidArgument."""
    given = {name: options[name] for name in CHAT_NAMES if options.get(name) is not None}
    if "tools" in given:
        given["tools"] = [_tool(each, i) for i, each in enumerate(given["tools"])]
    if "tool_choice" in given:
        given["tool_choice"] = named(
            from_inference.TOOL_CHOICES, given["tool_choice"], "tool_choice"
        )
    if "chat_template_kwargs" in given:
        values = given.pop("chat_template_kwargs")
        given["chat_template_kwargs"] = {
            name: build(struct_pb2.Value, f"chat_template_kwargs.{name}", **_kind(value))
            for name, value in values.items()
        }
    return given


def _kind(value: object) -> dict[str, Any]:
    """Returns a value by the name of its kind."""
    if isinstance(value, bool):
        return {"bool_value": value}
    if value is None:
        return {"null_value": 0}
    return {"string_value" if isinstance(value, str) else "number_value": value}


def _tool(values: Mapping[str, Any], index: int) -> inference_pb.Tool:
    path, fields = f"chat.tools[{index}]", dict(values)
    if fields.get("parameters") is not None:
        try:
            fields["parameters"] = json.dumps(fields["parameters"])
        except (TypeError, ValueError) as error:
            raise invalid(f"{path}.parameters", f"must be a JSON schema: {error}") from error
    return cast(inference_pb.Tool, build(inference_pb.Tool, path, **fields))


def _message(values: dict[str, Any], index: int) -> inference_pb.ChatMessage:
    """Returns a chat message. Raises InvalidArgument for no content, other than an assistant's, and
    for content in parts, without quoting it, because an image is long."""
    path = f"chat.messages[{index}]"
    content = values.get("content")
    if content is None and values.get("role") != "assistant":
        raise invalid(f"{path}.content", "must be a str: only an assistant's may be None or absent")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping)}
        parts = f" of {', '.join(sorted(kinds))}" if kinds else ""
        raise invalid(
            f"{path}.content",
            f"must not be a list of parts{parts}: give the text as a str, and images in `images`",
        )
    calls = [
        build(inference_pb.ToolCall, f"{path}.tool_calls[{place}]", **call)
        for place, call in enumerate(values.get("tool_calls") or ())
    ]
    fields = {**values, "tool_calls": calls} if calls else dict(values)
    if images := values.get("images"):
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise invalid(f"{path}.images", "must be a list, each item a ChatImage")
        fields["images"] = [_image(each, f"{path}.images[{i}]") for i, each in enumerate(images)]
    return cast(inference_pb.ChatMessage, build(inference_pb.ChatMessage, path, **fields))


def _image(values: object, path: str) -> inference_pb.ChatImage:
    """Returns an image of a message: by its hash, if that is known. Raises InvalidArgument that
    quotes no file."""
    if not isinstance(values, Mapping):
        raise invalid(path, "must be a ChatImage, such as {'data': ...}")
    if not isinstance(values.get("data", b""), bytes):
        raise invalid(f"{path}.data", "must be bytes, the image's file")
    left_out = "data" if "sha256" in values else ""
    fields = {name: value for name, value in values.items() if name != left_out}
    return cast(inference_pb.ChatImage, build(inference_pb.ChatImage, path, **fields))
