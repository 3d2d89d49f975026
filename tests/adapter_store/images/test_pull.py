from __future__ import annotations

import hashlib

import pytest

from adapter_store.core import ImagePart
from adapter_store.images.pull import CHUNK_BYTES, first_part, part_messages, start_offset
from contract.images.header import ImageChunk, LayerEnd
from servicekit.errors import InvalidArgument

SIZES = [1000, CHUNK_BYTES, 2 * CHUNK_BYTES + 7]
DATA = b"".join(bytes([i + 1]) * size for i, size in enumerate(SIZES))
PARTS = []
for i, size in enumerate(SIZES):
    start = sum(SIZES[:i])
    digest = hashlib.sha256(DATA[start : start + size]).digest()
    PARTS.append(ImagePart(i, start, start + size, digest))


def stream(offset: int) -> list[ImageChunk | LayerEnd]:
    first = first_part([(part.start, part.end) for part in PARTS], offset)
    return [m for part in PARTS[first:] for m in part_messages(memoryview(DATA), part, offset)]


def test_complete_image_in_order():
    messages = stream(0)
    chunks = [message for message in messages if isinstance(message, ImageChunk)]
    assert b"".join(chunk.data for chunk in chunks) == DATA
    assert all(len(chunk.data) <= 1.5 * CHUNK_BYTES for chunk in chunks)
    assert [len(chunk.data) for chunk in chunks[:2]] == SIZES[:2]
    assert all(isinstance(chunk.data, memoryview) for chunk in chunks)
    position = 0
    for message in messages:
        if isinstance(message, ImageChunk):
            assert message.offset == position
            position += len(message.data)
        else:
            part = PARTS[message.part]
            assert (position, message.sha256) == (message.end_offset, part.sha256)


@pytest.mark.parametrize(
    ("offset", "parts"),
    [(0, [0, 1, 2]), (1, [0, 1, 2]), (999, [0, 1, 2]), (1000, [1, 2]), (len(DATA) - 1, [2])],
)
def test_from_an_offset_only_parts_that_end_after_it(offset, parts):
    messages = stream(offset)
    assert messages[0].offset == offset
    data = b"".join(m.data for m in messages if isinstance(m, ImageChunk))
    assert data == DATA[offset:]
    assert [m.part for m in messages if isinstance(m, LayerEnd)] == parts


def test_at_the_very_end_there_is_nothing_left():
    assert stream(len(DATA)) == []


def test_where_a_stream_starts():
    assert start_offset(0, "", "i1", 100) == 0
    assert start_offset(60, "i1", "i1", 100) == 60
    assert start_offset(60, "i0", "i1", 100) == 0
    assert start_offset(60, "", "i1", 100) == 0
    assert start_offset(100, "i1", "i1", 100) == 100
    assert start_offset(10**9, "i0", "i1", 100) == 0
    with pytest.raises(InvalidArgument, match="after the image's 100 bytes") as caught:
        start_offset(101, "i1", "i1", 100)
    assert caught.value.subject == "offset"
