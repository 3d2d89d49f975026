"""Pulls: header, then chunks and layer ends in order, then the trailer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from adapter_store.catalog import ImageKey
from adapter_store.core import ImagePart, Segment, Tenants
from adapter_store.errors import InvalidArgument, StoreError
from adapter_store.image import ImagePlan
from adapter_store.images import Images
from adapter_store.metrics import Metrics

CHUNK_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Opens every pull. `offset` is where this stream starts."""

    image_id: str
    digest: str
    layout_id: str
    image_format: int
    total_bytes: int
    segments: tuple[Segment, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """Bytes of the image from `offset`; a chunk never reaches over the end of a part."""

    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Ends a part: `sha256` covers the bytes from the previous end to `end_offset`."""

    part: int
    end_offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ImageTrailer:
    """sha256 of the parts' sha256 values, concatenated in order."""

    sha256: bytes


PullMessage = ImageHeader | ImageChunk | LayerEnd | ImageTrailer


class Pulls:
    """Streams images. Lives on the event loop."""

    def __init__(self, images: Images, metrics: Metrics) -> None:
        self._images = images
        self._metrics = metrics
        self.num_active = 0

    async def stream(
        self, key: ImageKey, offset: int, image_id: str, tenants: Tenants = None
    ) -> AsyncGenerator[PullMessage]:
        """An image of one of these tenants from `offset` of `image_id` on, or from 0 if it is
        another one now.

        The image is held as long as the stream is open. Raises as Images.hold, and
        InvalidArgument for an offset beyond the image.
        """
        self.num_active += 1
        result = "cancelled"
        try:
            async with self._images.hold(key, tenants) as image:
                start = start_offset(offset, image_id, image.plan.image_id, image.plan.total_bytes)
                yield _header(image.plan, start)
                for message in part_messages(image.buffer.numpy().data, image.parts, start):
                    yield message
                    if isinstance(message, ImageChunk):
                        self._metrics.pulled_bytes.inc(len(message.data))
                yield ImageTrailer(image.sha256)
                result = "complete"
        except StoreError as error:
            result = error.reason.lower()
            raise
        finally:
            self.num_active -= 1
            self._metrics.pulls.labels(result).inc()


def start_offset(asked_offset: int, asked_image_id: str, image_id: str, total_bytes: int) -> int:
    """Where a stream starts: where asked to, but at 0 if that belonged to another image.

    Raises InvalidArgument for an offset beyond the end.
    """
    if asked_image_id != image_id:
        return 0
    if asked_offset > total_bytes:
        raise InvalidArgument(
            f"offset: {asked_offset} lies beyond the image's {total_bytes} bytes", subject="offset"
        )
    return asked_offset


def part_messages(
    buffer: memoryview, parts: Sequence[ImagePart], offset: int
) -> Iterator[ImageChunk | LayerEnd]:
    """Everything between header and trailer from `offset` on: only parts that end after it.

    buffer: the whole image, read-only bytes. Chunks are copied out of it one at a time.
    """
    for part in parts:
        if part.end <= offset:
            continue
        start = max(part.start, offset)
        for at in range(start, part.end, CHUNK_BYTES):
            yield ImageChunk(at, bytes(buffer[at : min(at + CHUNK_BYTES, part.end)]))
        yield LayerEnd(part.index, part.end, part.sha256)


def _header(plan: ImagePlan, offset: int) -> ImageHeader:
    return ImageHeader(
        plan.image_id,
        plan.digest,
        plan.layout_id,
        plan.image_format,
        plan.total_bytes,
        plan.segments,
        offset,
    )
