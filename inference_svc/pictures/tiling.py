"""Makes tiles of a decoded picture, as transformers' processors do with Pillow."""

from __future__ import annotations

import math
from typing import NamedTuple

from PIL import Image

from inference_svc.pictures.processor import CHANNELS, MAX_RATIO, MAX_SIDE, Form, Processor
from inference_svc.pictures.sizes import Size

MAX_PADDING = 3
"""How many times as many pixels as a picture may have its square may have, if it is padded to one:
so a process has memory for both."""


class TooLong(ValueError):
    """A picture is so narrow that it would have too many pixels in the size of the model."""


class TileShape(NamedTuple):
    """The form of a picture's tiles, which have the size `tile`. A picture that is cut has `rows`
    and `columns` of them, and one of the whole; otherwise both are 0, and there is one."""

    tile: Size
    rows: int = 0
    columns: int = 0

    @property
    def num_bytes(self) -> int:
        """The pixels of all tiles, a byte for each channel."""
        return CHANNELS * (self.rows * self.columns + 1) * self.tile.height * self.tile.width


class Tiling(NamedTuple):
    """Tiles, one behind the other: RGB, a byte each, row by row."""

    pixels: bytes
    shape: TileShape


def tile_shape(size: Size, processor: Processor, max_pixels: int) -> TileShape:
    """Returns the form of the tiles of a picture of this size. Raises TooLong if it would have more
    than `max_pixels` on the way, or MAX_PADDING times as many in a square."""
    tile = Size(processor.tile_size, processor.tile_size)
    if processor.form is Form.FREE:
        find = _within_square if processor.longest else _free_size
        return TileShape((_filling_size if processor.fills else find)(size, processor))
    if processor.form is Form.WHOLE:
        _check(_padded(size, processor), MAX_PADDING * max_pixels)
        _check(_shrunk(_padded(size, processor), processor), max_pixels)
    elif processor.splits:
        rows, columns = _in_tiles(_by_longer(size, processor.longest), processor.tile_size)
        if (rows, columns) != (1, 1):
            return TileShape(tile, rows, columns)
    return TileShape(tile)


def make_tiles(picture: Image.Image, processor: Processor, max_pixels: int) -> Tiling:
    """Returns the tiles of an RGB picture. Raises TooLong as `tile_shape`."""
    shape = tile_shape(_size_of(picture), processor, max_pixels)
    if processor.form is Form.WHOLE:
        return Tiling(_whole(picture, processor).tobytes(), shape)
    if processor.form is Form.SPLIT:
        picture = _resized(picture, _by_longer(_size_of(picture), processor.longest), processor)
        if shape.rows:
            return Tiling(_split(picture, processor, shape), shape)
    return Tiling(_resized(picture, shape.tile, processor).tobytes(), shape)


def _size_of(picture: Image.Image) -> Size:
    return Size(picture.height, picture.width)


def _within_square(size: Size, processor: Processor) -> Size:
    """Returns the size in which no side is longer than `longest`, and both are multiples of a
    factor, rounded up."""
    height, width = size
    ratio = max(height / processor.longest, width / processor.longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not (height and width):
        raise TooLong
    factor = processor.factor
    return Size(*(-(-side // factor) * factor for side in (height, width)))


def _filling_size(size: Size, processor: Processor) -> Size:
    """Returns the largest size of about the same proportions whose sides are multiples of a factor
    and whose pixels are within bounds."""
    height, width = size
    factor, most = processor.factor, processor.max_pixels
    grown = math.sqrt(most / (height * width))
    rows, columns = (math.floor(grown * side / factor) for side in (height, width))
    if not (rows or columns):
        raise TooLong
    longest = most // factor**2
    if rows == 0:
        rows, columns = 1, min(width // height, longest)
    elif columns == 0:
        rows, columns = min(height // width, longest), 1
    if rows * columns > longest:
        raise TooLong
    return Size(rows * factor, columns * factor)


def _free_size(size: Size, processor: Processor) -> Size:
    """Returns the size in which both sides are multiples of a factor, and pixels within bounds."""
    height, width = size
    factor = processor.factor
    if max(width, height) > MAX_RATIO * min(width, height):
        raise TooLong
    size = Size(*(round(side / factor) * factor for side in (height, width)))
    area = size.height * size.width
    if area > processor.max_pixels:
        shrink = math.sqrt(height * width / processor.max_pixels)
        sides = (math.floor(side / shrink / factor) * factor for side in (height, width))
        return Size(*(max(factor, side) for side in sides))
    if area < processor.min_pixels:
        grow = math.sqrt(processor.min_pixels / (height * width))
        return Size(*(math.ceil(side * grow / factor) * factor for side in (height, width)))
    return size


def _whole(picture: Image.Image, processor: Processor) -> Image.Image:
    square = _padded(_size_of(picture), processor)
    if square != _size_of(picture):
        padded = Image.new("RGB", (square.width, square.height), processor.padding)
        left, top = (square.width - picture.width) // 2, (square.height - picture.height) // 2
        padded.paste(picture, (left, top))
        picture = padded
    picture = _resized(picture, _shrunk(square, processor), processor)
    if not processor.crops:
        return picture
    side = processor.tile_size
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    # Where it is smaller than a tile the rest is black.
    return picture.crop((left, top, left + side, top + side))


def _padded(size: Size, processor: Processor) -> Size:
    """Returns the size of a picture's square, if it is padded to one."""
    side = max(size)
    return size if processor.padding is None else Size(side, side)


def _shrunk(size: Size, processor: Processor) -> Size:
    """Returns the size out of which the middle is cut: `size`, or the one whose shorter side is
    `shortest`."""
    if processor.size is not None:
        return processor.size
    height, width = size
    shortest = processor.shortest
    longest = int(shortest * max(width, height) / min(width, height))
    return Size(longest, shortest) if width <= height else Size(shortest, longest)


def _check(size: Size, max_pixels: int) -> None:
    if size.height * size.width > max_pixels:
        raise TooLong


def _split(picture: Image.Image, processor: Processor, shape: TileShape) -> bytes:
    """Returns the pixels of all tiles of a picture of the size that it is cut in, about."""
    tile = processor.tile_size
    picture = _resized(picture, Size(shape.rows * tile, shape.columns * tile), processor)
    parts = [
        picture.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile)).tobytes()
        for y in range(shape.rows)
        for x in range(shape.columns)
    ]
    parts.append(_resized(picture, shape.tile, processor).tobytes())
    return b"".join(parts)


def _by_longer(size: Size, longest: int) -> Size:
    """Returns the size in which the longer side is `longest`, at most MAX_SIDE, and the other one
    even."""
    height, width = size
    ratio = width / height
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        width, height = _even(int(longest * ratio)), longest
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return Size(max(height, 1), max(width, 1))


def _even(length: int) -> int:
    return length + length % 2


def _in_tiles(size: Size, tile: int) -> tuple[int, int]:
    """Returns the rows and columns of tiles that a picture of this size is cut into."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height // tile, width // tile


def _resized(picture: Image.Image, size: Size, processor: Processor) -> Image.Image:
    resample = Image.Resampling(processor.filter)
    return picture.resize((size.width, size.height), resample=resample)
