"""Writes the messages of pulls."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from google.protobuf.message import Message

from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from contract.protobuf import write_header, write_layer_end, write_trailer
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

MAX_KNOWN = 16
"""Different segments whose messages are kept."""
MAX_KNOWN_SEGMENTS = 4096
"""Images with more are written each time: to keep them would take megabytes."""


def to_pull_response(message: PullMessage) -> bytes:
    """Returns a serialized PullAdapterResponse. A chunk's bytes are copied once, from the image."""
    match message:
        case ImageChunk(offset, data):
            head = pb.ImageChunk(offset=offset).SerializeToString() + _DATA_TAG
            head += encode_varint(len(data))
            prefix = _CHUNK_TAG + encode_varint(len(head) + len(data))
            return b"".join((prefix, head, data))
        case LayerEnd():
            response = pb.PullAdapterResponse(layer_end=write_layer_end(message))
        case ImageTrailer():
            response = pb.PullAdapterResponse(trailer=write_trailer(message))
        case ImageHeader():
            return _to_header_response(message)
    return response.SerializeToString()


def _to_header_response(header: ImageHeader) -> bytes:
    """Returns the serialized response. A message's parts may be serialized one by one, and most of
    it are the segments, which adapters that were trained alike have in common."""
    is_large = len(header.segments) > MAX_KNOWN_SEGMENTS
    write = _write_segments if is_large else _known_segments
    segments = write(header.segments, header.image_format)
    content = write_header(replace(header, segments=())).SerializeToString() + segments
    return _HEADER_TAG + encode_varint(len(content)) + content


def _write_segments(segments: tuple[Segment, ...], image_format: int) -> bytes:
    header = ImageHeader("", "", "", image_format, 0, segments)
    return write_header(header).SerializeToString()


_known_segments = lru_cache(MAX_KNOWN)(_write_segments)


def encode_varint(value: int) -> bytes:
    """Encodes an unsigned number as Protocol Buffers do: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _length_delimited_tag(message: type[Message], field_name: str) -> bytes:
    return encode_varint(message.DESCRIPTOR.fields_by_name[field_name].number << 3 | 2)


_HEADER_TAG = _length_delimited_tag(pb.PullAdapterResponse, "header")
_CHUNK_TAG = _length_delimited_tag(pb.PullAdapterResponse, "chunk")
_DATA_TAG = _length_delimited_tag(pb.ImageChunk, "data")
