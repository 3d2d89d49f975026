"""Uploads arrive in pieces that are not all small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inference_svc.api.grpc.uploads import (
    MAX_CHUNK_BYTES,
    MAX_EXTRA_CHUNKS,
    MIN_CHUNK_BYTES,
    from_upload,
)
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument


def pieces(*sizes: int) -> int:
    """Returns how many pieces of an upload arrive."""

    async def requests() -> AsyncIterator[pb.UploadImageRequest]:
        yield pb.UploadImageRequest(upload=pb.ImageUpload(size_bytes=sum(sizes)))
        for size in sizes:
            yield pb.UploadImageRequest(chunk=bytes(size))

    async def main() -> int:
        _, _, found = await from_upload(requests())
        return len([each async for each in found])

    return asyncio.run(main())


def test_an_upload_of_many_small_chunks_is_refused() -> None:
    few = [1] * MAX_EXTRA_CHUNKS
    assert pieces(*few) == MAX_EXTRA_CHUNKS
    assert pieces(*[MIN_CHUNK_BYTES] * 4 * MAX_EXTRA_CHUNKS, *few) == 5 * MAX_EXTRA_CHUNKS
    assert pieces(MAX_CHUNK_BYTES, *few, 1)
    with pytest.raises(InvalidArgument, match="too many small chunks: send 512 bytes") as refused:
        pieces(*few, 1)
    assert refused.value.subject == "chunk"
