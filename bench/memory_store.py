"""A store without a wire that serves compiled images from memory, and any number of variants.

A variant is an image whose bytes differ from its original's in the first part only, by a few low
bits of its values, with hashes and a digest of its own: to the engine another adapter of the same
size. So a thousand adapters take the memory of one here, and all of theirs in the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from adapter_store import core as store_core
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_image
from adapter_store.images.layout import layout_id
from inference_svc.adapters.image_source import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import AdapterNotFound, StoreUnavailable

CHUNK_BYTES = 512 << 10
_DTYPES = {
    torch.float32: store_core.DataType.FLOAT32,
    torch.bfloat16: store_core.DataType.BFLOAT16,
    torch.float16: store_core.DataType.FLOAT16,
}


def variant_digest(digest: str, number: int) -> str:
    return "sha256:" + hashlib.sha256(f"{digest}/{number}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredImage:
    """`data` without its first part, which is `first`; `hashes` are the parts' sha256."""

    digest: str
    image: Image
    first: bytes
    hashes: tuple[bytes, ...]

    def bytes_of(self, start: int, end: int) -> bytes:
        """Returns bytes of one part: never across the end of the first."""
        if start < len(self.first):
            return self.first[start:end]
        return self.image.buffer[start:end].numpy().tobytes()


class MemoryStream:
    """One pull."""

    source = "memory"

    def __init__(self, stored: StoredImage, layout_id: str, offset: int) -> None:
        self._stored = stored
        self._layout_id = layout_id
        self._offset = offset
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def __iter__(self) -> Iterator[PullMessage]:
        for message in self._messages():
            if self._is_cancelled:
                raise StoreUnavailable("cancelled")
            yield message

    def _messages(self) -> Iterator[PullMessage]:
        stored, plan = self._stored, self._stored.image.plan
        segments = tuple(
            Segment(s.target, s.kind.value, s.rank, s.offset, s.length_bytes) for s in plan.segments
        )
        yield ImageHeader(
            stored.digest,  # one image per digest here
            stored.digest,
            self._layout_id,
            plan.image_format,
            plan.total_bytes,
            segments,
            self._offset,
        )
        for part, sha256 in zip(stored.image.parts, stored.hashes, strict=True):
            if part.start < self._offset:
                continue
            for start in range(part.start, part.end, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, part.end)
                yield ImageChunk(start, stored.bytes_of(start, end))
            yield LayerEnd(part.index, part.end, sha256)
        yield ImageTrailer(hashlib.sha256(b"".join(stored.hashes)).digest())


def store_layout(layout: ModelLayout) -> store_core.Layout:
    """An engine's layout as the adapter store knows it."""
    targets = tuple(
        store_core.Target(
            target.name,
            target.layer,
            target.group,
            store_core.TargetKind(target.kind),
            target.in_features,
            target.out_features,
        )
        for target in layout.targets
    )
    return store_core.Layout(
        layout.base_model,
        layout.config_sha256,
        _DTYPES[layout.dtype],
        1,
        targets,
    )


@dataclass
class MemoryStore:
    """Knows PEFT folders, which it compiles when the engine's layout is there."""

    folders: dict[str, Path] = field(default_factory=dict)
    _layout: store_core.Layout | None = None
    _layout_id: str = ""
    _stored: dict[str, StoredImage] = field(default_factory=dict)

    def register(self, folder: Path) -> str:
        """Gives the digest."""
        digest = open_checkpoint(folder).digest
        self.folders[digest] = folder
        return digest

    def accept_layout(self, layout: ModelLayout) -> str:
        """Gives the layout id."""
        self._layout = store_layout(layout)
        self._layout_id = layout_id(self._layout)
        return self._layout_id

    def compile(self, digest: str) -> None:
        """Makes the image of a registered adapter, once."""
        if digest in self._stored:
            return
        if digest not in self.folders:
            raise AdapterNotFound(f"no adapter {digest}", subject="digest")
        assert self._layout is not None
        checkpoint = open_checkpoint(self.folders[digest])
        image = compile_image(checkpoint, self._layout)
        first = image.buffer[: image.parts[0].end].numpy().tobytes()
        hashes = tuple(part.sha256 for part in image.parts)
        self._stored[digest] = StoredImage(digest, image, first, hashes)

    def add_variants(self, digest: str, count: int) -> list[str]:
        """The digests of `count` more adapters made of a registered one."""
        self.compile(digest)
        original = self._stored[digest]
        digests = []
        for number in range(count):
            first = bytearray(original.first)
            for bit in range(16):
                # The lowest bit of a bf16 or fp32 value in little endian: it stays finite.
                first[4 * bit] ^= number >> bit & 1
            name = variant_digest(digest, number)
            hashes = (hashlib.sha256(first).digest(), *original.hashes[1:])
            self._stored[name] = StoredImage(name, original.image, bytes(first), hashes)
            digests.append(name)
        return digests

    @property
    def image_bytes(self) -> int:
        """Size of the largest image."""
        return max(stored.image.plan.total_bytes for stored in self._stored.values())

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> MemoryStream:
        self.compile(digest)
        stored = self._stored[digest]
        return MemoryStream(stored, self._layout_id, offset if image_id == digest else 0)
