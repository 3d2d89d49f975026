"""A chunk that is read without a copy is what protobuf reads; all else is left to protobuf."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from adapter_store.api.convert import read_chunk
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

CHUNKS = st.builds(
    pb.FileChunk,
    file_name=st.text(max_size=40),
    offset=st.integers(0, (1 << 64) - 1),
    data=st.binary(max_size=300),
)


@given(chunk=CHUNKS)
@example(pb.FileChunk(file_name="\x1a\x03\x1a", offset=0x1A1A1A, data=b"\x1a" * 300))
@example(pb.FileChunk(file_name="a", data=bytes(1 << 21)))
def test_equals_protobufs(chunk: pb.FileChunk) -> None:
    found = read_chunk(pb.UploadAdapterRequest(chunk=chunk).SerializeToString())
    if not chunk.data:
        assert found is None
        return
    assert found is not None
    assert (found.file_name, found.offset) == (chunk.file_name, chunk.offset)
    assert bytes(found.data) == chunk.data


@given(
    raw=st.binary(max_size=60)
    | CHUNKS.map(lambda chunk: pb.UploadAdapterRequest(chunk=chunk).SerializeToString()),
    more=st.binary(max_size=6),
    cut=st.integers(0, 60),
)
def test_of_any_bytes_it_reads_what_protobuf_does(raw: bytes, more: bytes, cut: int) -> None:
    """Or nothing."""
    raw = raw[: len(raw) - cut] + more
    found = read_chunk(raw)
    if found is not None:
        chunk = pb.UploadAdapterRequest.FromString(raw).chunk
        assert (found.file_name, found.offset) == (chunk.file_name, chunk.offset)
        assert bytes(found.data) == chunk.data


def test_a_meta_is_left_to_protobuf() -> None:
    meta = pb.UploadMeta(name="a", description="b" * 100)
    assert read_chunk(pb.UploadAdapterRequest(meta=meta).SerializeToString()) is None
    assert read_chunk(b"") is None
