"""An image on disk: a valid .safetensors file, which standard tools open, around its bytes.

The data section is the image, starting on byte 4096 * n (the header is padded with spaces). Gaps
between segments are U8 tensors `_pad.N`. `__metadata__` names the image and the sha256 of every
part, so a file is checked in one pass: hash the parts, rebuild the header, compare. Next to the
file is `<name>.sha256` for `sha256sum -c`. Of float8 segments, `__metadata__` has the scales, in
their order, as little-endian fp32 in hex, after the sha256 of these bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from adapter_store.blobs.fsync import sync_folder, write_atomically
from adapter_store.core import ImagePart
from adapter_store.errors import CorruptData
from adapter_store.images.compile import Image
from adapter_store.images.plan.plan import ImagePlan
from adapter_store.images.plan.scales import with_scales
from adapter_store.images.tiers.buffers import allocate_buffer
from contract.images.dtypes import FLOAT8
from contract.images.header import Segment
from contract.images.rules import has_valid_scale

DATA_ALIGNMENT = 4096
_LENGTH_BYTES = 8


class ImageStream(Protocol):
    """The bytes of an image file, from the first, as `write_image` wrote them."""

    size_bytes: int

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Reads some of the following bytes into `buffer`; 0 at the end. Raises OSError."""

    def close(self) -> None: ...


def write_image(path: Path, image: Image) -> None:
    """Writes the file durably and atomically, then its `.sha256`; replaces old ones."""
    header = _header(image.plan, image.parts)
    data = image.buffer.numpy().data
    sha256 = hashlib.sha256(header)
    sha256.update(data)
    _replace(path, header, data)
    write_atomically(sha256_path(path), f"{sha256.hexdigest()}  {path.name}\n".encode())


def open_image(path: Path) -> LocalImage:
    """Opens an image file to be read. Raises FileNotFoundError."""
    return LocalImage(path)


class LocalImage(io.FileIO):
    """An ImageStream over a file; its name is used in errors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.size_bytes = os.fstat(self.fileno()).st_size


class Recorded(NamedTuple):
    """What an image file's header has: the plan, with the scales of its segments, and the parts."""

    plan: ImagePlan
    parts: tuple[ImagePart, ...]


def read_header(stream: ImageStream, plan: ImagePlan, name: str) -> Recorded:
    """Reads the header of an image file, with the scales if `plan` has none.

    Raises CorruptData if it is not the header of the image of this plan.
    """
    header = bytearray(_header_bytes(plan))
    expected_bytes = len(header) + plan.total_bytes
    if stream.size_bytes != expected_bytes:
        raise _corrupt(name, f"{stream.size_bytes} bytes, not {expected_bytes}")
    _fill(stream, memoryview(header), name)
    recorded = _recorded(header, plan)
    if recorded is None or header != _header(*recorded):
        raise _corrupt(name, "its header does not agree with its plan")
    return recorded


def read_parts(
    stream: ImageStream,
    recorded: Recorded,
    buffer: torch.Tensor,
    name: str,
    *,
    num_final: int = 0,
    is_verified: bool = False,
) -> Iterator[ImagePart]:
    """Fills `buffer` (uint8 [total_bytes]) after `read_header`, and yields each part once its bytes
    are checked. The first `num_final` parts are final already: they are not written and not
    yielded. The parts of a stream that `is_verified` are not hashed again.

    Raises CorruptData if the stream is not, byte for byte, the recorded image; the parts yielded
    before are valid nevertheless.
    """
    data = buffer.numpy().data
    for part in recorded.parts:
        if part.index < num_final:
            _fill(stream, memoryview(bytearray(part.end - part.start)), name)
            continue
        piece = data[part.start : part.end]
        _fill(stream, piece, name)
        if not is_verified and hashlib.sha256(piece).digest() != part.sha256:
            raise _corrupt(name, f"part {part.index} does not agree with its sha256")
        yield part


def read_image(path: Path, plan: ImagePlan, buffer: torch.Tensor | None = None) -> Image:
    """Reads the image of `plan`, into `buffer` (uint8 [plan.total_bytes]) if given, and checks
    every byte.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptData: it is not, byte for byte, the image of this plan.
    """
    if buffer is None:
        buffer = allocate_buffer(plan.total_bytes)
    with open_image(path) as file:
        recorded = read_header(file, plan, path.name)
        parts = tuple(read_parts(file, recorded, buffer, path.name))
        return Image(recorded.plan, buffer, parts)


def remove_image(path: Path) -> None:
    """Removes the file and its `.sha256`; either may be absent."""
    for name in (path, sha256_path(path)):
        name.unlink(missing_ok=True)


def sha256_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _header(plan: ImagePlan, parts: tuple[ImagePart, ...]) -> bytes:
    """Returns the length and the JSON header, a multiple of 4096 bytes that depends on the plan
    only."""
    fields: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "loadout.image_id": plan.image_id,
            "loadout.digest": plan.digest,
            "loadout.layout_id": plan.layout_id,
            "loadout.image_format": str(plan.image_format),
            "loadout.parts": " ".join(f"{p.start}-{p.end}:{p.sha256.hex()}" for p in parts),
        }
    }
    scales = _scales_of(plan)
    if scales:
        fields["__metadata__"]["loadout.scales"] = _scales_text(scales)
    position = 0
    pads = 0
    for name, segment in zip(plan.names, plan.segments, strict=True):
        if segment.offset < position:
            continue  # its bytes have the name of an earlier one
        pads = _add_pad(fields, position, segment.offset, pads)
        position = segment.offset + segment.length_bytes
        fields[name] = _tensor_info(segment, position)
    _add_pad(fields, position, plan.total_bytes, pads)
    text = json.dumps(fields, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def _tensor_info(segment: Segment, end: int) -> dict[str, Any]:
    """Bytes of experts, which begin with an index, are no matrix of the format."""
    assert segment.dtype is not None
    dtype, shape = segment.dtype.value, list(segment.shape)
    if math.prod(shape) * segment.dtype.itemsize != segment.length_bytes:
        dtype, shape = "U8", [segment.length_bytes]
    return {"dtype": dtype, "shape": shape, "data_offsets": [segment.offset, end]}


def _add_pad(fields: dict[str, Any], start: int, end: int, pads: int) -> int:
    if start == end:
        return pads
    fields[f"_pad.{pads}"] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    return pads + 1


def _replace(path: Path, header: bytes, data: memoryview) -> None:
    """Writes the file so that readers see the old one or the complete new one, also after a power
    cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _fill(stream: ImageStream, buffer: memoryview, name: str) -> None:
    while buffer:
        count = stream.readinto(buffer)
        if not count:
            raise _corrupt(name, "ends early")
        buffer = buffer[count:]


def _header_bytes(plan: ImagePlan) -> int:
    blank = bytes(hashlib.sha256().digest_size)
    parts = (ImagePart(i, start, end, blank) for i, (start, end) in enumerate(plan.parts))
    return len(_header(plan, tuple(parts)))


def _scales_of(plan: ImagePlan) -> list[float]:
    """Returns the scales of the float8 segments, in order."""
    return [segment.scale for segment in plan.segments if segment.dtype is FLOAT8]


def _scales_text(scales: Sequence[float]) -> str:
    data = np.array(scales, "<f4").tobytes()
    return f"{hashlib.sha256(data).hexdigest()}:{data.hex()}"


def _recorded(header: bytearray, plan: ImagePlan) -> Recorded | None:
    """Returns the plan with the header's scales, and its parts with the header's hashes; None if it
    has no such hashes or scales."""
    try:
        metadata = json.loads(header[_LENGTH_BYTES:])["__metadata__"]
        hashes = [
            bytes.fromhex(entry.rpartition(":")[2]) for entry in metadata["loadout.parts"].split()
        ]
        ranges = zip(plan.parts, hashes, strict=True)
        parts = tuple(ImagePart(i, *span, sha256) for i, (span, sha256) in enumerate(ranges))
        if not plan.has_scales:
            scales = metadata["loadout.scales"].rpartition(":")[2]
            plan = with_scales(plan, np.frombuffer(bytes.fromhex(scales), "<f4").tolist())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_valid = all(map(has_valid_scale, plan.segments))  # the sha256 is compared with the header
    return Recorded(plan, parts) if is_valid else None


def _corrupt(name: str, detail: str) -> CorruptData:
    return CorruptData(f"{name}: {detail}", subject=name)
