"""Reads an upload's messages that have a piece of a file, without copying it twice."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from adapter_store.sources.upload import FileChunk
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

_CHUNK = pb.UploadAdapterRequest.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2
_DATA = pb.FileChunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2
_MAX_HEAD_BYTES = 512
"""How far into a message its data begin, at most: tags, lengths, the offset, and a file's name."""
_MAX_LENGTH_BYTES = 5


def read_chunk(raw: bytes) -> FileChunk | None:
    """Returns the chunk of a serialized UploadAdapterRequest, its data a view of `raw`. None unless
    it has a chunk alone whose last field is its data, as clients write it: then protobuf reads it,
    and says what is wrong. Takes no longer for a longer one.

    The encoding is https://protobuf.dev/programming-guides/encoding: a chunk is
    tag, length, {tag, length, file name; tag, offset; tag, length, data}."""
    if not raw or raw[0] != _CHUNK:
        return None
    length, start = _read_length(raw, 1)
    if start + length != len(raw):
        return None
    place = raw.find(_DATA.to_bytes(1, "little"), start, start + _MAX_HEAD_BYTES)
    while place >= 0:
        num_bytes, data_start = _read_length(raw, place + 1)
        if data_start + num_bytes == len(raw):
            head = _read_head(raw[start:place])
            if head is not None:
                return FileChunk(head.file_name, head.offset, memoryview(raw)[data_start:])
        place = raw.find(_DATA.to_bytes(1, "little"), place + 1, start + _MAX_HEAD_BYTES)
    return None


def _read_head(raw: bytes) -> pb.FileChunk | None:
    """Returns what comes before the data; None if that is no whole message, or has data, too."""
    try:
        head = pb.FileChunk.FromString(raw)
    except DecodeError:
        return None
    return None if head.data else head


def _read_length(raw: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and where it ends; (0, 0) if there is none."""
    value = 0
    for index in range(_MAX_LENGTH_BYTES):
        if place + index >= len(raw):
            return 0, 0
        byte = raw[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    return 0, 0
