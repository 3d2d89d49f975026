"""Changes inputs and keeps their form: a value of JSON, or a field of a message.

Parsers refuse bytes that are changed at random. Inputs that keep their form are parsed and reach
the later checks. The worker mixes them with the fuzzer's own changes of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from adapter_store.api.bounds import REQUESTS as STORE_REQUESTS
from fuzz.format_2 import SEPARATOR
from fuzz.gguf import change_gguf
from fuzz.requests import MODEL_LEN
from inference_svc.api.grpc.bounds import request_bounds
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

Change: TypeAlias = Callable[[bytes, Random], bytes | None]
"""Returns a changed part of an input, or None if the part has another form."""

NUMBERS = (
    *(0, 1, -1, 2, 3, 4, 7, 8, 16, 255, 256, 257, 1023, 1024, 4096, 65_536),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63),
    *((1 << 64) - 1, 10**30, -(1 << 31), -(1 << 63)),
)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e-310, 3.5e38, 1e308, float("inf"), float("nan"))
TEXTS = (
    *("", "a", "A@2", "team/a@1", "/", "..", "\0", "\x7f", "é", "\U0010ffff", " ", "x" * 300),
    *("sha256:" + "0" * 64, "model.layers.0.mlp.experts.w1", "q_proj", "(.*)*", "F32", "none"),
)
MAX_DEPTH = 24

# --- JSON ---------------------------------------------------------------------------------------


def change_json(data: bytes, random: Random) -> bytes | None:
    """Changes one to three places in a JSON text."""
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return None
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(root)
        if not places:
            return b""
        _change_place(*random.choice(places), places, random)
    if not root:
        return b""
    try:
        return json.dumps(root[0]).encode()
    except (ValueError, RecursionError):
        return None


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Returns the place of every value: its container, and the key or index there."""
    found: list[tuple[Any, Any]] = []
    left: list[tuple[Any, int]] = [(root, 0)]
    while left:
        holder, depth = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list) and depth < MAX_DEPTH:
                left.append((holder[key], depth + 1))
    return found


def _change_place(holder: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    if isinstance(holder, dict) and key not in holder:
        return
    if isinstance(holder, list) and key >= len(holder):
        return
    other_holder, other_key = random.choice(places)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1:
            _add(holder, random.choice((*TEXTS, other_key)), holder[key])
        case 2 if isinstance(holder, dict):
            holder[str(random.choice((*TEXTS, other_key)))] = holder.pop(key)
        case 3:
            try:
                holder[key] = json.loads(json.dumps(other_holder[other_key]))
            except (LookupError, RecursionError, ValueError):
                return
        case _:
            holder[key] = _near(holder[key], random)


def _add(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[str(key)] = value
    elif len(holder) < 64:
        holder.append(value)


def _near(value: Any, random: Random) -> Any:
    """Returns a similar value, or sometimes a value of another kind."""
    if random.random() < 0.15:
        return random.choice((None, True, [], {}, *NUMBERS, *FLOATS, *TEXTS))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, value * 2, random.choice(NUMBERS)))
    if isinstance(value, float):
        return random.choice((value * 2, -value, random.choice(FLOATS)))
    if isinstance(value, str):
        return _near_text(value, random)
    return value


def _near_text(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    added = random.choice((*TEXTS, *"0129.,:-_/<>|"))
    return random.choice((text[:at] + added + text[at:], text[:at] + text[at + 1 :], added))


def change_weights(data: bytes, random: Random) -> bytes | None:
    """Changes the header of a .safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + length], random)
    if header is None:
        return None
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def change_tensors(data: bytes, random: Random) -> bytes | None:
    """Changes the header of a .safetensors file, or some bytes of its tensors."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start >= len(data) or random.random() < 0.3:
        return change_weights(data, random)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(start, len(data))
        value = random.choice((b"\0", b"\xff", b"\x7f", b"\x80", random.randbytes(1)))
        data = data[:at] + value + data[at + 1 :]
    return data


# --- messages -----------------------------------------------------------------------------------


def change_message(kind: type[Message]) -> Change:
    """Returns a function that changes one to three fields of a message."""

    def change(data: bytes, random: Random) -> bytes | None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return None
        for _ in range(random.choice((1, 1, 2, 3))):
            _change_field(random.choice(_messages(message)), random)
        return message.SerializeToString()

    return change


def _messages(message: Message) -> list[Message]:
    """Returns a message and all messages within it."""
    found = [message]
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or _is_map(field):
            continue
        for each in value if field.is_repeated else [value]:
            found += _messages(each)
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _change_field(message: Any, random: Random) -> None:
    descriptor = message.DESCRIPTOR
    if not descriptor.fields:
        return
    present = [field for field, _ in message.ListFields()]
    field = random.choice(present if present and random.random() < 0.7 else descriptor.fields)
    value = getattr(message, field.name)
    if random.random() < 0.1:
        message.ClearField(field.name)
    elif _is_map(field):
        value[random.choice(TEXTS)] = random.choice(TEXTS)
    elif field.is_repeated:
        _change_entries(value, field, random)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        value.SetInParent()
    else:
        _set(message, field, value, random)


def _change_entries(entries: Any, field: FieldDescriptor, random: Random) -> None:
    at = random.randrange(len(entries)) if entries else None
    if at is not None and random.random() < 0.3:
        del entries[at]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        added = entries.add()
        if at is not None:
            added.CopyFrom(entries[at])
    elif at is not None and random.random() < 0.5:
        entries[at] = _scalar(field, entries[at], random)
    else:
        entries.append(_scalar(field, field.default_value or _zero(field), random))


def _set(message: Any, field: FieldDescriptor, value: Any, random: Random) -> None:
    setattr(message, field.name, _scalar(field, value, random))


_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 9),
}


def _zero(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b""
    return "" if field.type == FieldDescriptor.TYPE_STRING else 0


def _scalar(field: FieldDescriptor, value: Any, random: Random) -> Any:
    """Returns another value that is valid in this field."""
    if field.cpp_type in _BITS:
        low, high = _BITS[field.cpp_type]
        near = (value + 1, value - 1, value * 2, value + 256, random.choice(NUMBERS))
        return min(max(random.choice(near), low), high)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_STRING:
        return _near_text(value, random)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return change_bytes(value, random)
    return random.choice((value * 2, -value, *FLOATS))


def change_bytes(data: bytes, random: Random) -> bytes:
    """Changes, adds or removes some bytes, or replaces a number of four bytes."""
    at = random.randrange(len(data) + 1)
    if random.random() < 0.4:
        at -= at % 4
        number = random.choice(NUMBERS) & 0xFFFFFFFF
        return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]
    added = random.randbytes(random.randrange(4))
    return data[:at] + added + data[at + random.randrange(4) :]


# --- inputs -------------------------------------------------------------------------------------


def change_entry(data: bytes, random: Random) -> bytes:
    """Changes the kind, name or content of a folder's entry."""
    kind, (name, _, content) = data[:1], data[1:].partition(b"\0")
    match random.randrange(4):
        case 0:
            kind = random.choice((b"f", b"s", b"l", b"p", b"d", b"u"))
        case 1:
            name = change_bytes(name, random)
        case _:
            changed = change_json(content, random) or change_weights(content, random)
            content = changed or change_bytes(content, random)
    return kind + name + b"\0" + content


def _of_parts(target: str, parts: list[bytes], index: int) -> Change:
    """Returns the change that keeps the form of this part."""
    if target in ("store_request", "inference_request"):
        table = STORE_REQUESTS if target == "store_request" else request_bounds(MODEL_LEN)
        bounds = table.get(parts[0].decode("latin-1"))
        return change_bytes if bounds is None or index == 0 else change_message(bounds.message)
    if target in ("checkpoint", "mlx_checkpoint"):
        return change_json if index == 0 else change_weights
    if target == "packed":
        return change_json if index == 0 else change_tensors
    if target == "image":
        return change_message(pb.ImageHeader) if index == 0 else change_bytes
    if target == "http" and index == 0:
        return change_bytes
    return _FORMS.get(target, change_bytes)


_FORMS: Mapping[str, Change] = {
    **dict.fromkeys(
        ("header_text", "config", "mlx_config", "index", "contents", "tokenizer", "extract"),
        change_json,
    ),
    "http": change_json,
    "gguf": change_gguf,
    "folder": change_entry,
    "pull": change_message(pb.PullAdapterResponse),
    "layout": change_message(pb.RegisterLayoutRequest),
    "upload": change_message(pb.UploadAdapterRequest),
}


def mutate(target: str, data: bytes, seed: int) -> bytes | None:
    """Returns the input with one part changed, or None if the part has another form."""
    random = Random(seed)
    if target in ("layout", "gguf"):
        return _FORMS[target](data, random)
    mode, data = (data[:1], data[1:]) if target == "upload" else (b"", data)
    parts = data.split(SEPARATOR)
    index = random.randrange(len(parts))
    if random.random() < 0.1:
        at = random.randrange(len(parts))
        parts[index], parts[at] = parts[at], parts[index]
    elif len(parts) > 2 and random.random() < 0.1:
        parts.insert(random.randrange(len(parts)), parts[index])
    else:
        changed = _of_parts(target, parts, index)(parts[index], random)
        if changed is None:
            return None
        parts[index] = changed
    return mode + SEPARATOR.join(parts)
