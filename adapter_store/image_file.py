"""An image on disk: a valid .safetensors file that standard tools open, its bytes unchanged.

The data section is the image, starting on byte 4096 * n (the header is padded with spaces). Gaps
between segments are U8 tensors `_pad.N`. `__metadata__` names the image and the sha256 of every
part, so a file is checked in one pass: hash the parts, build the header anew, compare. Beside the
file lies `<name>.sha256` for `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch

from adapter_store.core import ImagePart
from adapter_store.durable import sync_folder, write_atomically
from adapter_store.errors import CorruptData
from adapter_store.image import Image, ImagePlan, allocate_buffer

DATA_ALIGNMENT = 4096
_LENGTH_BYTES = 8


def write_image(path: Path, image: Image) -> None:
    """Writes the file durably and atomically, then the `.sha256` beside it; replaces old ones."""
    header = _header(image.plan, image.parts)
    data = image.buffer.numpy().data
    sha256 = hashlib.sha256(header)
    sha256.update(data)
    _replace(path, header, data)
    write_atomically(sha256_path(path), f"{sha256.hexdigest()}  {path.name}\n".encode())


def read_image(path: Path, plan: ImagePlan, buffer: torch.Tensor | None = None) -> Image:
    """Reads the image of `plan`, into `buffer` (uint8 [plan.total_bytes]) if given, and checks
    every byte.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptData: it is not, byte for byte, the image of this plan.
    """
    if buffer is None:
        buffer = allocate_buffer(plan.total_bytes)
    placeholder = tuple(
        ImagePart(index, start, end, bytes(32)) for index, (start, end) in enumerate(plan.parts)
    )
    header_bytes = len(_header(plan, placeholder))
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != header_bytes + plan.total_bytes:
            raise _corrupt(path, f"{size_bytes} bytes, not {header_bytes + plan.total_bytes}")
        header = file.read(header_bytes)
        data = buffer.numpy().data
        parts = []
        for index, (start, end) in enumerate(plan.parts):
            if file.readinto(data[start:end]) != end - start:
                raise _corrupt(path, "ends early")
            parts.append(ImagePart(index, start, end, hashlib.sha256(data[start:end]).digest()))
    if header != _header(plan, tuple(parts)):
        raise _corrupt(path, "its header does not agree with its bytes and plan")
    return Image(plan, buffer, tuple(parts))


def remove_image(path: Path) -> None:
    """Removes the file and its `.sha256`; either may be absent."""
    for name in (path, sha256_path(path)):
        name.unlink(missing_ok=True)


def sha256_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _header(plan: ImagePlan, parts: tuple[ImagePart, ...]) -> bytes:
    """Length and JSON header, a multiple of 4096 bytes; its length depends only on the plan."""
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
    position = 0
    pads = 0
    tensors = zip(plan.names, plan.shapes, plan.segments, strict=True)
    for name, shape, segment in tensors:
        pads = _add_pad(fields, position, segment.offset, pads)
        position = segment.offset + segment.length_bytes
        fields[name] = {
            "dtype": plan.dtype.value,
            "shape": list(shape),
            "data_offsets": [segment.offset, position],
        }
    _add_pad(fields, position, plan.total_bytes, pads)
    text = json.dumps(fields, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def _add_pad(fields: dict[str, Any], start: int, end: int, pads: int) -> int:
    if start == end:
        return pads
    fields[f"_pad.{pads}"] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    return pads + 1


def _replace(path: Path, header: bytes, data: memoryview) -> None:
    """Readers see the old file or the whole new one, also after a power cut."""
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


def _corrupt(path: Path, detail: str) -> CorruptData:
    return CorruptData(f"{path.name}: {detail}", subject=path.name)
