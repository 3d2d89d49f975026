"""Fuzzes images from a store that lies: the hashes are right, and the content is arbitrary; and
pictures of prompts, which callers send."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from google.protobuf.message import DecodeError

from contract.images.header import ImageHeader
from fuzz.format_2 import DIGEST, LAYOUT_ID, MAX_IMAGE_BYTES, SEPARATOR, SERVED, pull
from fuzz.refusals import refused
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.resident import Resident, Shape
from inference_svc.adapters.memory.tiers import TableWrite
from inference_svc.backends.arena import Arena
from inference_svc.pictures.processor import HALF, Form, Processor
from inference_svc.pictures.sizes import Size
from inference_svc.pictures.task import NUM_BYTES, TILES, answer, packed
from kernels.lora.rows import NO_EXPERT
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument
from servicekit.shared_memory import SharedMemory

MAX_RANK = 64
MAX_PIXELS = 1 << 16
_CUT = Processor(Form.WHOLE, 28, 3, HALF, HALF, shortest=28, crops=True)
_SIZED = Processor(Form.WHOLE, 28, 3, HALF, HALF, size=Size(31, 20), crops=True)
_PADDED = Processor(Form.WHOLE, 28, 3, HALF, HALF, size=Size(28, 28), padding=(1, 2, 3))
_SPLIT = Processor(Form.SPLIT, 28, 1, HALF, HALF, longest=84, splits=True)
_SHRUNK = Processor(Form.SPLIT, 28, 1, HALF, HALF, longest=84)
_FREE = Processor(Form.FREE, 0, 3, HALF, HALF, factor=28, min_pixels=1 << 12, max_pixels=1 << 16)
_WITHIN = Processor(Form.FREE, 0, 3, HALF, HALF, factor=28, longest=100)
_FILLING = Processor(Form.FREE, 0, 3, HALF, HALF, factor=28, max_pixels=70 * 28**2, fills=True)
PROCESSORS = (_CUT, _SIZED, _PADDED, _SPLIT, _SHRUNK, _FREE, _WITHIN, _FILLING)
"""One of each way to make tiles."""


def fuzz_image(data: bytes) -> None:
    """Pulls an image: its header, a separator and its bytes, with zeros up to the header's size.

    The image is refused, or each matrix that kernels compute with lies within it.
    """
    header_bytes, _, content = data.partition(SEPARATOR)
    try:
        header = pb.ImageHeader.FromString(header_bytes)
    except DecodeError:
        return
    header.digest, header.layout_id, header.offset = DIGEST, LAYOUT_ID, 0
    size = min(header.total_bytes, MAX_IMAGE_BYTES)
    pulled = pull(_messages(header, content[:size].ljust(size, b"\0")))
    if pulled is not None and pulled[0].rank <= MAX_RANK:
        _compute_with(*pulled)


def fuzz_picture(data: bytes) -> None:
    """Decodes a picture: it is refused with a reason, or becomes tiles of the right size."""
    for processor in PROCESSORS:
        facts = {"processor": processor.to_json(), "max_pixels": MAX_PIXELS}
        measured = answer(packed(facts | {"memory": None}, data))
        kind, content = answer(packed(facts | {"memory": _memory().file}, data))
        if measured[0] == b"R":
            assert kind == b"R", "its header is refused, but the file is not"
        with refused(InvalidArgument):
            if kind == b"R":
                assert isinstance(content, str)
                raise InvalidArgument(f"picture: {content}", subject="picture")
            assert isinstance(content, bytes)
            assert isinstance(measured[1], bytes)
            num_bytes, rows, columns, *sides = TILES.unpack(content)
            tile, num_tiles = Size(*sides), rows * columns + 1
            assert processor.makes(tile)
            assert num_tiles <= processor.max_tiles
            assert num_bytes == num_tiles * 3 * tile.height * tile.width
            assert num_bytes <= NUM_BYTES.unpack(measured[1])[0] <= processor.max_bytes


@cache
def _memory() -> SharedMemory:
    """Returns the memory that tiles are written to."""
    return SharedMemory("fuzz", max(each.max_bytes for each in PROCESSORS))


def _messages(header: pb.ImageHeader, content: bytes) -> list[bytes]:
    """Returns the store's messages of an image, with a part for each different start of a
    segment."""
    starts = sorted({each.offset for each in header.segments if each.offset < len(content)} | {0})
    messages = [pb.PullAdapterResponse(header=header)]
    hashes = []
    for part, (start, end) in enumerate(zip(starts, [*starts[1:], len(content)], strict=True)):
        if start == end:
            continue
        hashes.append(hashlib.sha256(content[start:end]).digest())
        chunk = pb.ImageChunk(offset=start, data=content[start:end])
        layer_end = pb.LayerEnd(part=part, end_offset=end, sha256=hashes[-1])
        messages += [
            pb.PullAdapterResponse(chunk=chunk),
            pb.PullAdapterResponse(layer_end=layer_end),
        ]
    total = hashlib.sha256(b"".join(hashes)).digest()
    messages.append(pb.PullAdapterResponse(trailer=pb.ImageTrailer(sha256=total)))
    return [message.SerializeToString() for message in messages]


@cache
def _arena() -> Arena:
    return Arena(SERVED, MAX_IMAGE_BYTES, 1, MAX_RANK, torch.device("cpu"))


def _compute_with(header: ImageHeader, content: bytes) -> None:
    """Adds the image to the table and reads each matrix as kernels do."""
    arena = _arena()
    arena.memory[: len(content)] = content
    shape = Shape.of(header)
    assert shape.num_bytes == len(content)
    extents = (Extent(0, 0, len(content)),) if content else ()
    arena.apply([TableWrite(Resident(header, 0, extents, header.rank))])
    SERVED.contents(header)
    SERVED.replaced_targets(header)
    for expert in (NO_EXPERT, *range(SERVED.targets[3].experts)):
        for target, found in arena.table.weights(0, expert).items():
            features = SERVED.targets[target].in_features, SERVED.targets[target].out_features
            rank = found.b.shape[0]
            assert found.a.shape in ((rank, features[0]), (features[0], rank))
            assert found.b.shape == (rank, features[1])
            for matrix in (found.a, found.b):
                end = matrix.storage_offset() + matrix.numel()
                assert end * matrix.itemsize <= len(content), "a matrix ends after the image"
