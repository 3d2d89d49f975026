"""Images, and the messages of a pull: header, then chunks and layer ends in order, then the
trailer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from contract.images.dtypes import FLOAT8, DataType
from contract.images.segment_kinds import SegmentKind

GRANULE_BYTES = 256
"""Segments start on multiples of this, and images end there."""
MIN_SCALE, MAX_SCALE = 2.0**-40, 2.0**60
"""Bounds of a float8 segment's scale. A product of two is a normal fp32 number, and so is a bias
divided by it."""


def align(num_bytes: int) -> int:
    """Returns the next offset at which a segment may start."""
    return -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES


class InvalidImage(ValueError):
    """An image that breaks a rule of images."""


class Segment(NamedTuple):
    """One matrix or vector in an image, of the layout's target with this index: `offset` and
    `length_bytes` in bytes, offset a multiple of 256. Values are multiplied by `scale`, which is 1
    but for float8, and for a bias beside float8: there it is the product of A's and B's, so that
    one factor is the whole target's. The wire's format 1 leaves out dtype and shape, which follow
    from the layout; the dtype of a later release is None, too."""

    target: int
    kind: SegmentKind
    rank: int
    offset: int
    length_bytes: int
    dtype: DataType | None = None
    shape: tuple[int, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The first message of a pull. The stream starts at `offset`: 0 if another `image_id` was
    requested. With a `share_ticket` no chunks follow: it is for the image's file; see `sharing`.
    `not_shared` is why there is none although the request could use one. `ends` and `trailer` are
    the messages that would follow the header of an image with a ticket, if it has them all."""

    image_id: str
    digest: str
    layout_id: str
    image_format: int
    total_bytes: int
    segments: tuple[Segment, ...]
    offset: int = 0
    share_ticket: bytes = field(default=b"", repr=False)
    not_shared: str = ""
    ends: tuple[LayerEnd, ...] = field(default=(), repr=False)
    trailer: ImageTrailer | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """The largest rank of any target; 0 of an empty image."""
        return max((segment.rank for segment in self.segments), default=0)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """Bytes of the image from `offset`; a chunk never crosses the end of a part. `data` may be a
    view of memory that belongs to the image or to the received message."""

    offset: int
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Ends part `part`: `sha256` covers the bytes from the previous end to `end_offset`."""

    part: int
    end_offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ImageTrailer:
    """Ends an image; see `trailer_sha256`."""

    sha256: bytes


def trailer_sha256(part_hashes: Iterable[bytes], segments: Iterable[Segment]) -> bytes:
    """Returns the hash that ends an image.

    It is the sha256 of the parts' sha256 values, concatenated in order; of an image with float8
    segments the scales of these come first, as little-endian fp32 in order.
    """
    scales = [segment.scale for segment in segments if segment.dtype is FLOAT8]
    return hashlib.sha256(np.array(scales, "<f4").tobytes() + b"".join(part_hashes)).digest()


PullMessage = ImageHeader | ImageChunk | LayerEnd | ImageTrailer
