"""Counts the entries of a serialized message without parsing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_OTHER_FIELDS = 1024
"""Fields that are not counted, known or not, at the levels that are scanned."""
MAX_UNPACKED = 4096
"""Numbers of a repeated field that come one by one. Every client of ours packs them; each takes as
long to count as a thousand that are packed."""
MAX_FIELDS_PER_ENTRY = 16
"""Fields that are not counted of the messages that repeat, on average, if the repeated fields
within them are counted."""
MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


class Malformed(ValueError):
    """The bytes are no message."""


class TooMany(ValueError):
    """A field has more entries than its limit."""

    def __init__(self, path: str, limit: int, what: str = "entries") -> None:
        super().__init__(f"{path}: more than {limit} {what}")
        self.path = path


@dataclass(slots=True)
class _Node:
    """A field that is counted, or a message whose fields are; `limit` None: it is not itself.
    `others` is the name for the message's fields that are not counted themselves, and how many of
    them there may be."""

    path: str = ""
    limit: int | None = None
    is_packable: bool = False
    children: dict[int, _Node] = field(default_factory=dict)
    others: tuple[str, int] = ("request", MAX_OTHER_FIELDS)


class Counter:
    """Counts the fields of a message and of the messages in it. `limits` has the paths of repeated
    fields, such as "layout.targets", and of repeated fields within these, such as
    "layout.targets.other_names", for all of them together."""

    def __init__(self, message: type[Message], limits: Mapping[str, int]) -> None:
        self._root = _node(message.DESCRIPTOR, "", limits)

    def check(self, raw: bytes) -> None:
        """Raises TooMany, and Malformed for bytes that are no message. Takes time for as many
        fields as are allowed, however large the message is."""
        _Scan(raw).walk(0, len(raw), self._root)

    def has_at_most(self, raw: bytes, num_fields: int) -> bool:
        """Returns whether the message has no more fields than this, and packed numbers in as few
        bytes; bytes that are no message have not."""
        try:
            _Scan(raw, num_fields).walk(0, len(raw), self._root)
        except (TooMany, Malformed):
            return False
        return True


def _node(message: Any, path: str, limits: Mapping[str, int]) -> _Node:
    """Returns the node of a message of this descriptor."""
    node = _Node(path.removesuffix("."))
    _add_children(node, message, path, limits)
    return node


def _add_children(node: _Node, message: Any, path: str, limits: Mapping[str, int]) -> None:
    for found in message.fields:
        own = f"{path}{found.name}"
        if found.is_repeated:
            assert own in limits, f"{own} has no limit"
            is_packable = found.type not in (
                *(FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING),
                FieldDescriptor.TYPE_BYTES,
            )
            child = node.children[found.number] = _Node(own, limits[own], is_packable)
            child.others = f"{own}.*", MAX_FIELDS_PER_ENTRY * limits[own]
            entry = found.message_type
            if entry is not None and not entry.GetOptions().map_entry:
                _add_children(child, entry, f"{own}.", limits)
        elif found.message_type is not None:
            child = _Node(own, others=node.others)
            _add_children(child, found.message_type, f"{own}.", limits)
            if not path or child.children:  # else there is nothing in it to count
                node.children[found.number] = child


class _Scan:
    """`most` bounds the fields of all kinds together; None: each kind has its own bound."""

    def __init__(self, raw: bytes, most: int | None = None) -> None:
        self._raw = raw
        self._most = most
        self._counts: dict[str, int] = {}

    def walk(self, position: int, end: int, node: _Node) -> None:
        """Reads the fields of one message, `node`, in raw[position:end]."""
        raw = self._raw
        while position < end:
            tag = raw[position]
            position += 1
            if tag >= 0x80:
                tag, position = self._varint(position - 1, end)
            child = node.children.get(tag >> 3)
            kind = tag & 7
            self._count(child, kind, node.others)
            if kind == _VARINT:
                _, position = self._varint(position, end)
            elif kind == _DELIMITED:
                size, position = self._varint(position, end)
                if size > end - position:
                    raise Malformed
                if child is not None:
                    self._enter(position, position + size, child)
                position += size
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise Malformed  # groups: no message of ours has any
        if position != end:
            raise Malformed

    def _enter(self, position: int, end: int, node: _Node) -> None:
        if node.limit is None or node.children:
            self.walk(position, end, node)
        elif node.is_packable:
            limit = node.limit * MAX_VARINT_BYTES if self._most is None else self._most
            if end - position > limit:
                raise TooMany(node.path, node.limit)

    def _count(self, node: _Node | None, kind: int, others: tuple[str, int]) -> None:
        path, limit, what = *others, "entries"
        if self._most is not None:
            path, limit = "request", self._most
        elif node is not None and node.limit is not None:
            path, limit = node.path, node.limit
            if node.is_packable and kind != _DELIMITED and limit > MAX_UNPACKED:
                limit, what = MAX_UNPACKED, "entries that are not packed"
        self._counts[path] = number = self._counts.get(path, 0) + 1
        if number > limit:
            raise TooMany(path, limit, what)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Returns the number that is encoded at `position`, and where it ends."""
        raw = self._raw
        if position < end and (first := raw[position]) < 0x80:
            return first, position + 1
        value = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            if position >= end:
                break
            byte = raw[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise Malformed
