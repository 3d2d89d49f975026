"""Images of a small layout, and an adapter store in memory that can misbehave."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch

from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import IMAGE_FORMATS, ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.errors import AdapterNotFound, StoreUnavailable

LAYOUT_ID = "sha256:layout"
IN, OUT = 64, 96


@dataclass(frozen=True)
class TestImage:
    """An image of `data`, a part per target."""

    __test__ = False

    header: ImageHeader
    data: bytes
    ends: tuple[int, ...]


def small_layout() -> ModelLayout:
    """Returns the layout of these images: three targets, each in a layer of its own."""
    targets = tuple(
        Target(f"model.layers.{i}.mlp.up_proj", i, f"layers.{i}.up", TargetKind.LINEAR, IN, OUT)
        for i in range(3)
    )
    return ModelLayout("base", "0" * 64, torch.float32, IMAGE_FORMATS, targets)


def make_image(digest: str, rank: int, targets: tuple[int, ...] = (0, 1, 2)) -> TestImage:
    segments, ends, position = [], [], 0
    for target in targets:
        for kind, features in ((SegmentKind.A, IN), (SegmentKind.B, OUT)):
            length = rank * features * 4
            segments.append(Segment(target, kind, rank, position, length))
            position += -(-length // 256) * 256
        ends.append(position)
    generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()[:4]))
    data = torch.randn(position // 4, generator=generator).numpy().tobytes()
    header = ImageHeader(f"id-{digest}", digest, LAYOUT_ID, 1, position, tuple(segments))
    return TestImage(header, data, tuple(ends))


def reserve(slots: Slots, header: ImageHeader) -> Resident:
    """Reserves memory that must be there."""
    reservation = slots.reserve(header)
    assert reservation is not None
    return reservation.resident


class MemoryMapping:
    """A mapped image, whose bytes are gone once nobody holds it."""

    def __init__(self, data: bytes) -> None:
        self._bytes = bytearray(data)
        self.data = memoryview(self._bytes)
        self.num_holders = 1

    def copy(self, offset: int, memory: memoryview) -> None:
        assert self.num_holders
        memory[:] = self.data[offset : offset + len(memory)]

    def hold(self) -> None:
        assert self.num_holders
        self.num_holders += 1

    def release(self) -> None:
        assert self.num_holders
        self.num_holders -= 1
        if not self.num_holders:
            self._bytes[:] = b"?" * len(self._bytes)


@dataclass
class MemoryRegistrar:
    """Registers memory with no device: notes what is registered, by address, and refuses it while
    `error` is set."""

    error: str = ""
    registered: set[int] = field(default_factory=set)
    num_registered: int = 0

    def register(self, data: memoryview) -> None:
        if self.error:
            raise OSError(self.error)
        self.registered.add(id(data.obj))
        self.num_registered += 1

    def unregister(self, data: memoryview) -> None:
        assert bytes(data[:1]) != b"?", "it is unmapped"
        self.registered.remove(id(data.obj))


@dataclass
class MemoryStream:
    """One pull; `cancel` ends any wait of it."""

    messages: Callable[[MemoryStream], Iterator[PullMessage]]
    cancelled: threading.Event = field(default_factory=threading.Event)
    source: str = "memory"
    mapped: MemoryMapping | None = None

    def __iter__(self) -> Generator[PullMessage]:
        try:
            for message in self.messages(self):
                if self.cancelled.is_set():
                    raise StoreUnavailable("cancelled")
                yield message
        finally:
            if self.mapped is not None:
                self.mapped.release()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class MemoryStore:
    """Implements AdapterStore in memory. `lose_after` streams end early, once each, after so many
    chunks; `corrupt` streams are damaged; while `gate` is clear, streams wait after the header.
    With `maps` images are mapped, in `mappings`, and not sent.
    """

    images: dict[str, TestImage] = field(default_factory=dict)
    lose_after: list[int] = field(default_factory=list)
    corrupt: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    pulls: list[tuple[str, int]] = field(default_factory=list)
    maps: bool = False
    mappings: list[MemoryMapping] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, digest: str, rank: int = 4) -> TestImage:
        self.images[digest] = make_image(digest, rank)
        return self.images[digest]

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> MemoryStream:
        self.pulls.append((digest, offset))
        return MemoryStream(lambda stream: self._messages(stream, digest, offset, image_id))

    def _messages(
        self, stream: MemoryStream, digest: str, offset: int, image_id: str
    ) -> Iterator[PullMessage]:
        image = self.images.get(digest)
        if image is None:
            raise AdapterNotFound(f"no adapter {digest}")
        start = offset if image_id == image.header.image_id else 0
        header = image.header
        if self.maps and not start:
            data = bytearray(image.data)
            data[0] ^= self.corrupt > 0
            stream.mapped = MemoryMapping(data)
            self.mappings.append(stream.mapped)
        yield ImageHeader(
            header.image_id, digest, LAYOUT_ID, 1, header.total_bytes, header.segments, start
        )
        while not self.gate.wait(0.01):
            if stream.cancelled.is_set():
                raise StoreUnavailable("cancelled")
        lose = self.lose_after.pop(0) if self.lose_after else -1
        for message in self._body(image, start, lose):
            if stream.mapped is None or not isinstance(message, ImageChunk):
                yield message

    def _body(self, image: TestImage, start: int, lose: int) -> Iterator[PullMessage]:
        hashes = []
        previous = 0
        damaged, self.corrupt = self.corrupt > 0, max(0, self.corrupt - 1)
        for part, end in enumerate(image.ends):
            whole = image.data[previous:end]
            hashes.append(hashlib.sha256(whole).digest())
            if previous >= start:
                for at in range(previous, end, 700):
                    if lose == 0:
                        raise StoreUnavailable("stream lost")
                    lose -= 1
                    data = image.data[at : min(at + 700, end)]
                    yield ImageChunk(at, bytes([data[0] ^ 1]) + data[1:] if damaged else data)
                yield LayerEnd(part, end, hashes[-1])
            previous = end
        yield ImageTrailer(hashlib.sha256(b"".join(hashes)).digest())
