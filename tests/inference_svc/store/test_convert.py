"""Messages of a pull: what we read without the parser is what the parser reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.images.header import ImageChunk, ImageHeader, ImageTrailer, LayerEnd
from contract.images.segment_kinds import SegmentKind
from inference_svc.errors import CorruptImage
from inference_svc.store.convert import (
    MAX_SEGMENTS,
    from_announcement,
    to_event,
    to_pull_message,
    to_record,
)
from inference_svc.store.types import Announcement, NameEvent
from loadout.adapter_store.v1 import adapter_store_pb2 as pb


@given(st.integers(0, 2**63 - 1), st.binary(min_size=1, max_size=300))
def test_chunk_is_a_view_of_the_message(offset: int, data: bytes) -> None:
    chunk = pb.ImageChunk(offset=offset, data=data)
    message = to_pull_message(pb.PullAdapterResponse(chunk=chunk).SerializeToString())
    assert isinstance(message, ImageChunk)
    assert isinstance(message.data, memoryview)
    assert (message.offset, bytes(message.data)) == (offset, data)


def test_other_chunk_encodings_go_to_the_parser() -> None:
    """Data before offset, and a field of the future."""
    body = b"\x12\x03abc\x08\x07"
    assert to_pull_message(b"\x12" + bytes([len(body)]) + body) == ImageChunk(7, b"abc")
    body += b"\x7a\x01x"
    assert to_pull_message(b"\x12" + bytes([len(body)]) + body) == ImageChunk(7, b"abc")
    assert to_pull_message(b"\x12\x00") == ImageChunk(0, b"")


def test_other_parts() -> None:
    end = pb.LayerEnd(part=3, end_offset=9, sha256=b"h")
    data = pb.PullAdapterResponse(layer_end=end).SerializeToString()
    assert to_pull_message(data) == LayerEnd(3, 9, b"h")
    data = pb.PullAdapterResponse(trailer=pb.ImageTrailer(sha256=b"t")).SerializeToString()
    assert to_pull_message(data) == ImageTrailer(b"t")


@given(st.binary(max_size=40))
def test_any_bytes_parse_or_raise(data: bytes) -> None:
    """Never read differently from the parser, whatever it is."""
    try:
        message = to_pull_message(data)
    except CorruptImage:
        return
    response = pb.PullAdapterResponse.FromString(data)
    if isinstance(message, ImageChunk):
        assert response.WhichOneof("part") == "chunk"
        assert message.offset == response.chunk.offset
        assert bytes(message.data) == response.chunk.data


@given(st.integers(0, 2**20), st.binary(min_size=1, max_size=40), st.data())
def test_damaged_chunks(offset: int, content: bytes, draw: st.DataObject) -> None:
    chunk = pb.ImageChunk(offset=offset, data=content)
    data = bytearray(pb.PullAdapterResponse(chunk=chunk).SerializeToString())
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    try:
        message = to_pull_message(bytes(data))
    except CorruptImage:
        return
    response = pb.PullAdapterResponse.FromString(bytes(data))
    if isinstance(message, ImageChunk):
        assert message.offset == response.chunk.offset
        assert bytes(message.data) == response.chunk.data


def test_change_event_has_the_digest() -> None:
    event = pb.AdapterEvent(
        revision=7, kind=pb.EVENT_KIND_UPDATED, name="default/a", digest="sha256:1", version=2
    )
    assert to_event(event) == NameEvent(7, "default/a", "sha256:1", 2)
    event.kind, event.version = pb.EVENT_KIND_DELETED, 0
    assert to_event(event) == NameEvent(7, "default/a"), "it points to nothing"
    event.kind = pb.EVENT_KIND_PINNED
    assert to_event(event) == NameEvent(7), "it points to what it did before"


@pytest.mark.slow
@pytest.mark.parametrize(("field", "tag"), [("segments", 0x32), ("ends", 0x52)])
def test_large_headers_are_counted_before_they_are_parsed(field: str, tag: int) -> None:
    """Two bytes of an empty segment would take hundreds in memory."""
    for count, found in ((MAX_SEGMENTS, MAX_SEGMENTS), (MAX_SEGMENTS + 1, None)):
        body = bytes([tag, 0]) * count
        size = len(body)
        length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
        data = b"\x0a" + length + body
        if found is None:
            with pytest.raises(CorruptImage, match=rf"header\.{field}: more than"):
                to_pull_message(data)
            continue
        message = to_pull_message(data)
        assert isinstance(message, ImageHeader)
        assert len(getattr(message, field)) == found
    with pytest.raises(CorruptImage, match="malformed"):
        to_pull_message(data[:-1])


def test_empty_message_is_refused() -> None:
    with pytest.raises(CorruptImage):
        to_pull_message(b"")


def test_record_says_what_else_an_adapter_has() -> None:
    kinds = [pb.SEGMENT_KIND_MAGNITUDE, pb.SEGMENT_KIND_FULL, 99]
    adapter = pb.Adapter(targets=["q_proj"], segment_kinds=kinds)
    record = to_record(adapter, 5)
    assert record.targets == ("q_proj",)
    assert record.segment_kinds == (SegmentKind.MAGNITUDE, SegmentKind.FULL, 99)
    assert record.invocation_tokens == ()
    adapter.invocation_tokens.extend([0, 7])
    assert to_record(adapter, 5).invocation_tokens == (0, 7)


def test_server_announces_what_it_applies() -> None:
    assert from_announcement(Announcement(("b",), 16)) == pb.Announcement(
        aliases=["b"], max_rank=16, applies_invocation_tokens=True
    )
    restricted = from_announcement(Announcement((), 16, ("q_proj", "v_proj")))
    assert list(restricted.lora_targets) == ["q_proj", "v_proj"]
    assert from_announcement(Announcement((), 16, weight_form="nf4")).weight_form == "nf4"
    of_rank = Announcement((), 16, num_ranks=2, rank_index=1, first_announcement_id="sha256:0")
    message = from_announcement(of_rank)
    assert (message.num_ranks, message.rank_index) == (2, 1)
    assert message.first_announcement_id == "sha256:0"
