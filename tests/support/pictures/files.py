"""Pictures as files, of every form that callers send."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Returns a picture of blobs and noise: filters and crops that differ show in it."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.sin(x / (3 + seed) + np.cos(y / 5)) + np.cos(y / (4 + seed))
    values = 60 * waves[..., None] + generator.normal(128, 30, (height, width, 4))
    pixels = values.clip(0, 255).astype(np.uint8)
    if mode in ("RGBA", "CMYK"):
        return Image.fromarray(pixels, mode)
    if mode == "LA":
        return Image.fromarray(pixels[..., :2].copy(), mode)
    return Image.fromarray(pixels[..., :3].copy(), "RGB").convert(mode)


def encoded(found: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns a picture as a file."""
    file = BytesIO()
    found.save(file, kind, **options)
    return file.getvalue()


def with_long_header(found: Image.Image, num_markers: int = 5_000_000) -> bytes:
    """Returns a JPEG file with so many empty segments, whose header takes Pillow seconds."""
    file = encoded(found, "JPEG")
    return file[:2] + b"\xff\xe0\0\2" * num_markers + file[2:]


def png(width: int, height: int, bits: int, colour_type: int, lines: bytes) -> bytes:
    """Returns a PNG file of these lines of pixels, each behind its filter, however many they
    are."""
    return packed_png(width, height, bits, colour_type, zlib.compress(lines))


def packed_png(width: int, height: int, bits: int, colour_type: int, data: bytes) -> bytes:
    """Returns a PNG file of compressed lines."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
