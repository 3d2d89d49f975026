"""Counts the entries of a serialized message without parsing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_OTHER_FIELDS = 1024
"""Fields that are not counted, known or not, at the levels that are scanned."""
MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


class Malformed(ValueError):
    """The bytes are no message."""


class TooMany(ValueError):
    """A field has more entries than its limit."""

    def __init__(self, path: str, limit: int) -> None:
        super().__init__(path)
        self.path = path
        self.limit = limit


@dataclass(slots=True)
class _Node:
    """A field on the way to those that are counted; `limit` None: it is not itself."""

    path: str = ""
    limit: int | None = None
    is_packable: bool = False
    children: dict[int, _Node] = field(default_factory=dict)


class Counter:
    """Counts the repeated fields of a message type. `limits` has their paths, such as
    "layout.targets"."""

    def __init__(self, message: type[Message], limits: Mapping[str, int]) -> None:
        self._root = _Node()
        for path, limit in limits.items():
            _add(self._root, message.DESCRIPTOR, path, limit)

    def check(self, raw: bytes) -> None:
        """Raises TooMany, and Malformed for bytes that are no message. Takes time for as many
        fields as are allowed, however large the message is."""
        if self._root.children:
            _Scan(raw).walk(0, len(raw), self._root)


def _add(root: _Node, descriptor: Any, path: str, limit: int) -> None:
    node, message = root, descriptor
    for name in path.split("."):
        found = message.fields_by_name[name]
        node = node.children.setdefault(found.number, _Node(path))
        message = found.message_type
    assert found.is_repeated, path
    node.path, node.limit = path, limit
    node.is_packable = found.type not in (
        *(FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES),
    )


class _Scan:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._counts: dict[str, int] = {}

    def walk(self, position: int, end: int, node: _Node) -> None:
        """Reads the fields of one message, `node`, in raw[position:end]."""
        while position < end:
            tag, position = self._varint(position, end)
            child = node.children.get(tag >> 3)
            self._count(child)
            kind = tag & 7
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
        if node.limit is None:
            self.walk(position, end, node)
        elif node.is_packable and end - position > node.limit * MAX_VARINT_BYTES:
            raise TooMany(node.path, node.limit)

    def _count(self, node: _Node | None) -> None:
        path, limit = "request", MAX_OTHER_FIELDS
        if node is not None and node.limit is not None:
            path, limit = node.path, node.limit
        self._counts[path] = number = self._counts.get(path, 0) + 1
        if number > limit:
            raise TooMany(path, limit)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Returns the number that is encoded at `position`, and where it ends."""
        value = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            if position >= end:
                break
            byte = self._raw[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise Malformed
