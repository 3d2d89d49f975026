"""Uploads arrive at a pace, in pieces that are not all small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inference_svc.api.grpc.uploads import (
    MAX_CHUNK_BYTES,
    MAX_EXTRA_CHUNKS,
    MIN_CHUNK_BYTES,
    from_upload,
    in_time,
)
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import DeadlineExceeded, InvalidArgument
from servicekit.shares import Pace


async def messages(*delays_s: float) -> AsyncIterator[pb.UploadImageRequest]:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        yield pb.UploadImageRequest(chunk=b"abc")


def received(pace: Pace, *delays_s: float) -> int:
    async def main() -> int:
        return len([each async for each in in_time(messages(*delays_s), pace)])

    return asyncio.run(main())


def test_a_slow_upload_ends() -> None:
    assert received(Pace(1, 3600.0), 0, 0, 0.01) == 3
    for pace in (Pace(1 << 40, 0.02), Pace(1, 0.02)):  # too few bytes, and silence
        with pytest.raises(DeadlineExceeded, match="has sent nothing"):
            received(pace, 0, 0.005, 0.005, 0.005, 0.005, 0.005, 3600.0)


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
