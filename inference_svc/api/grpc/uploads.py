"""Uploads of images as streams of messages: a description, then the file in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from inference_svc.api.grpc.prompts import check, checked_salt
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import DeadlineExceeded, InvalidArgument
from servicekit.pace import Pace

MAX_CHUNK_BYTES = 1 << 20
MAX_EXTRA_CHUNKS, MIN_CHUNK_BYTES = 256, 512
"""An upload may have so many more chunks than one for each so many bytes: receiving many small ones
would hold up the event loop."""
PACE = Pace(bytes_per_second=64 << 10, stall_seconds=30.0)


async def from_upload(
    requests: AsyncIterator[pb.UploadImageRequest],
) -> tuple[int, str, AsyncGenerator[bytes]]:
    """Returns the size of the file, its salt, and the pieces as they arrive. Raises InvalidArgument
    naming the field, as the pieces do."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("part") != "upload":
        raise InvalidArgument("part: an upload begins with `upload`", subject="part")
    salt = checked_salt(first.upload.cache_salt, "upload.cache_salt")
    return first.upload.size_bytes, salt, _pieces(requests)


async def _pieces(requests: AsyncIterator[pb.UploadImageRequest]) -> AsyncGenerator[bytes]:
    num_chunks = num_bytes = 0
    async for request in requests:
        if request.WhichOneof("part") != "chunk":
            raise InvalidArgument("part: after `upload` only chunks may follow", subject="part")
        chunk = request.chunk
        check(0 < len(chunk) <= MAX_CHUNK_BYTES, "chunk", f"1 to {MAX_CHUNK_BYTES} bytes")
        num_chunks += 1
        num_bytes += len(chunk)
        if num_chunks > MAX_EXTRA_CHUNKS + num_bytes // MIN_CHUNK_BYTES:
            raise InvalidArgument(
                f"chunk: the upload has too many small chunks: send {MIN_CHUNK_BYTES} bytes or "
                "more in each",
                subject="chunk",
            )
        yield chunk


def upload_stalled(pace: Pace) -> DeadlineExceeded:
    """Returns the error for a caller that is slower than this."""
    return DeadlineExceeded(
        f"the upload has sent nothing for {pace.stall_seconds:g} seconds, or less than "
        f"{pace.bytes_per_second} bytes per second for as long",
        subject="request",
    )
