"""A store in the engine's process that serves compiled images from memory, with many variants.

A variant differs from its original only in the first part, by a few low bits of its first values,
and has its own hashes and digest. To the engine it is another adapter of the same size. A thousand
adapters take the memory of one in this store, and their full memory in the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from adapter_store.api import convert as of_store
from adapter_store.api.pull_messages import to_pull_response
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_image
from adapter_store.images.plan.layout import layout_id
from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    trailer_sha256,
)
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store.convert import from_layout, to_pull_message

CHUNK_BYTES = 512 << 10


def variant_digest(digest: str, number: int) -> str:
    return "sha256:" + hashlib.sha256(f"{digest}/{number}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image with its own first part, `first`; `hashes` are the parts' sha256."""

    header: ImageHeader
    image: Image
    first: bytes
    hashes: tuple[bytes, ...]

    def bytes_of(self, start: int, end: int) -> bytes:
        """Returns bytes within one part, never across the end of the first part."""
        if start < len(self.first):
            return self.first[start:end]
        return self.image.buffer[start:end].numpy().tobytes()


class MemoryStream:
    """One pull."""

    source, mapped = "memory", None

    def __init__(self, stored: StoredImage, offset: int) -> None:
        self._stored = stored
        self._offset = offset
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def __iter__(self) -> Generator[PullMessage]:
        for message in self._messages():
            if self._is_cancelled:
                raise StoreUnavailable("cancelled")
            yield message

    def _messages(self) -> Iterator[PullMessage]:
        stored = self._stored
        yield replace(stored.header, offset=self._offset)
        for part, sha256 in zip(stored.image.parts, stored.hashes, strict=True):
            if part.start < self._offset:
                continue
            for start in range(part.start, part.end, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, part.end)
                yield ImageChunk(start, stored.bytes_of(start, end))
            yield LayerEnd(part.index, part.end, sha256)
        yield ImageTrailer(trailer_sha256(stored.hashes, stored.header.segments))


def store_layout(layout: ModelLayout) -> Layout:
    """Converts an engine's layout to the adapter store's, in the newest image format."""
    return replace(of_store.from_layout(from_layout(layout)), image_format=layout.image_formats[-1])


def image_header(image: Image) -> ImageHeader:
    """Returns an image's header as an engine receives it."""
    received = to_pull_message(to_pull_response(image.plan.header()))
    assert isinstance(received, ImageHeader)
    return received


@dataclass
class MemoryStore:
    """Registers PEFT folders, and compiles them after it has the engine's layout."""

    folders: dict[str, Path] = field(default_factory=dict)
    _layout: Layout | None = None
    _stored: dict[str, StoredImage] = field(default_factory=dict)

    def register(self, folder: Path) -> str:
        """Registers a folder and returns its digest."""
        digest = open_checkpoint(folder).digest
        self.folders[digest] = folder
        return digest

    def accept_layout(self, layout: ModelLayout) -> str:
        """Returns the layout's id."""
        self._layout = store_layout(layout)
        return layout_id(self._layout)

    def compile(self, digest: str) -> None:
        """Compiles the image of a registered adapter, once."""
        if digest in self._stored:
            return
        if digest not in self.folders:
            raise AdapterNotFound(f"no adapter {digest}", subject="digest")
        assert self._layout is not None
        checkpoint = open_checkpoint(self.folders[digest])
        image = compile_image(checkpoint, self._layout)
        first = image.buffer[: image.parts[0].end].numpy().tobytes()
        hashes = tuple(part.sha256 for part in image.parts)
        self._stored[digest] = StoredImage(image_header(image), image, first, hashes)

    def add_variants(self, digest: str, count: int) -> list[str]:
        """Makes `count` more adapters from a registered one, and returns their digests."""
        self.compile(digest)
        original = self._stored[digest]
        # Ids of rows must not change, because each has one place.
        start = next(
            each.offset for each in original.header.segments if each.kind is not SegmentKind.ROW_IDS
        )
        digests = []
        for number in range(count):
            first = bytearray(original.first)
            for bit in range(16):
                # The lowest bit of a bf16 or fp32 value in little endian, so it stays finite.
                first[start + 4 * bit] ^= number >> bit & 1
            name = variant_digest(digest, number)
            hashes = (hashlib.sha256(first).digest(), *original.hashes[1:])
            header = replace(original.header, image_id=name, digest=name)
            self._stored[name] = StoredImage(header, original.image, bytes(first), hashes)
            digests.append(name)
        return digests

    def header(self, digest: str) -> ImageHeader:
        """Returns a compiled image's header as the engine receives it."""
        return self._stored[digest].header

    @property
    def image_bytes(self) -> int:
        """Size of the largest image."""
        return max(stored.header.total_bytes for stored in self._stored.values())

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> MemoryStream:
        self.compile(digest)
        stored = self._stored[digest]
        return MemoryStream(stored, offset if image_id == stored.header.image_id else 0)
