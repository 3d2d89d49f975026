"""The adapter store as the inference service needs it: a Protocol, and the messages of a pull.

`store.client` implements it over gRPC; tests implement it in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Segment:
    """A matrix or vector of the image: target index in the layout, kind such as "a" or "bias",
    rank, byte offset and length. Format 1 leaves out dtype, by its name in torch, and shape."""

    target: int
    kind: str
    rank: int
    offset: int
    length_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Opens every pull. The stream starts at `offset`: 0 if another `image_id` was requested."""

    image_id: str
    digest: str
    layout_id: str
    image_format: int
    total_bytes: int
    segments: tuple[Segment, ...]
    offset: int = 0

    @property
    def rank(self) -> int:
        """The largest rank of any target; 0 of an empty image."""
        return max((segment.rank for segment in self.segments), default=0)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Ends part `part`: the bytes from the previous end to `end_offset` have this sha256."""

    part: int
    end_offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ImageTrailer:
    """Ends an image; `sha256` is of the parts' sha256 values, concatenated in order."""

    sha256: bytes


PullMessage = ImageHeader | ImageChunk | LayerEnd | ImageTrailer


class PullStream(Protocol):
    """One pull in progress: an iterator over its messages. `source` names the replica of the store
    that sends them."""

    @property
    def source(self) -> str: ...

    def __iter__(self) -> Iterator[PullMessage]: ...

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; a wait for its next message then raises
        StoreUnavailable. Idempotent."""
        ...


class AdapterStore(Protocol):
    def pull(
        self,
        digest: str,
        layout_id: str,
        offset: int = 0,
        image_id: str = "",
        avoid: Collection[str] = (),
    ) -> PullStream:
        """Streams an image from `offset` of `image_id`, and from none of the sources to `avoid` if
        there is a choice. Iterating blocks: use a pull thread.

        Iterating raises AdapterNotFound, AdapterUnusable, CorruptImage (never worth a retry) or
        StoreUnavailable (the stream is lost and may be resumed).
        """
        ...
