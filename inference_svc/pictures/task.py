"""Decodes a stranger's picture, and makes tiles of it: the task of a sandboxed process.

A request is the length of its facts, the facts as JSON, and the file as it is: see `packed`.
A request without a `memory` asks for the size of the tiles. The kind of its answer is S, the most
bytes that they can have by the file's header. Else the kind is T, how many bytes of tiles it has
written to the `memory`, their rows and columns, and the height and width of a tile. In both cases
it may be R, why the file is refused; or M, nothing, for a file that takes too much memory. Pillow's
other formats are never tried: their decoders are large, and few of them are safe.
"""

from __future__ import annotations

import errno
import json
import mmap
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from inference_svc.pictures.processor import Processor
from inference_svc.pictures.sizes import Size
from inference_svc.pictures.tiling import TooLong, make_tiles, tile_shape

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "La", "RGBa"))
"""Pillow's modes of 8 bits a channel or less."""
FACTS = struct.Struct(">L")
"""The length of the facts at the beginning of a request."""
TILES = struct.Struct(">QHHLL")
"""The content of an answer of the kind T."""
NUM_BYTES = struct.Struct(">Q")
"""The content of an answer of the kind S."""

Image.init()
Image.MAX_IMAGE_PIXELS = None  # the bound is a request's
ImageFile.LOAD_TRUNCATED_IMAGES = False


class Refused(Exception):
    """The file is not decoded, for this reason."""


def packed(facts: Mapping[str, Any], data: bytes | memoryview) -> bytes:
    """Returns a request. `facts` are the processor's, the most pixels, and the file of the memory
    for tiles, or None to ask for their size; `data` are the file's bytes."""
    head = json.dumps(facts).encode()
    return b"".join((FACTS.pack(len(head)), head, data))


def answer(request: bytes) -> tuple[bytes, bytes | str]:
    end = FACTS.size + FACTS.unpack_from(request)[0]
    facts, data = json.loads(request[FACTS.size : end]), memoryview(request)[end:]
    processor, max_pixels = Processor.from_json(facts["processor"]), facts["max_pixels"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if facts["memory"] is None:
                return b"S", NUM_BYTES.pack(_most_bytes(data, processor, max_pixels))
            picture = _decoded(data, max_pixels)
            pixels, shape = make_tiles(picture, processor, max_pixels)
        _write(facts["memory"], pixels)
    except Refused as refused:
        return b"R", str(refused)
    except TooLong:
        return b"R", "is too long and narrow for its size: cut it, or make it smaller"
    except MemoryError:
        return b"M", b""
    return b"T", TILES.pack(len(pixels), shape.rows, shape.columns, *shape.tile)


def _write(file: int, pixels: bytes) -> None:
    """Writes to a memory that this process has inherited. Raises MemoryError."""
    try:
        memory = mmap.mmap(file, 0)
    except OSError as error:
        raise MemoryError if error.errno == errno.ENOMEM else error from None
    with memory:
        memory[: len(pixels)] = pixels


def _most_bytes(data: memoryview, processor: Processor, max_pixels: int) -> int:
    """Returns the bytes of a picture's tiles. Raises Refused, TooLong, and MemoryError."""
    with _refusals():
        width, height = _opened(data, max_pixels).size
    # EXIF data that turn it may be behind the pixels. It has hardly other tiles then.
    turned = Size(height, width), Size(width, height)
    return max(tile_shape(each, processor, max_pixels).num_bytes for each in turned)


def _decoded(data: memoryview, max_pixels: int) -> Image.Image:
    """Returns a picture in RGB, as its EXIF data turn it. Raises Refused, and MemoryError."""
    with _refusals():
        picture = _opened(data, max_pixels)
        picture.load()
        return _opaque(ImageOps.exif_transpose(picture))


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises Refused for any error of a decoder, and MemoryError."""
    try:
        yield
    except (MemoryError, Refused):
        raise
    except UnidentifiedImageError:
        raise Refused(f"is no picture in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception as error:  # decoders raise any error, also as they look for a second frame
        raise Refused(_damaged(error)) from None


def _opened(data: memoryview, max_pixels: int) -> ImageFile.ImageFile:
    """Returns a picture before it is decoded. Raises Refused for a file by its header, and errors
    of its decoder."""
    picture = Image.open(BytesIO(data), formats=FORMATS)
    width, height = picture.size
    if width * height > max_pixels:
        raise Refused(f"has {width} x {height} pixels; at most {max_pixels} are decoded")
    # Cameras' MPO files are JPEG files with others behind them.
    if picture.format != "MPO" and getattr(picture, "is_animated", False):
        raise Refused("is animated: send one frame")
    if picture.mode not in MODES or _is_cut(picture):
        raise Refused("has over 8 bits a channel: save it with 8")
    return picture


def _is_cut(picture: ImageFile.ImageFile) -> bool:
    """Returns whether Pillow gives a file's wider values a mode of 8 bits: it drops the others."""
    return picture.format == "PNG" and any(";16" in str(tile[3]) for tile in picture.tile)


def _opaque(picture: Image.Image) -> Image.Image:
    """Returns a picture in RGB, on white where it is transparent, as transformers' processors."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def _damaged(error: Exception) -> str:
    return f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}"
