"""Makes tiles of a decoded picture, as transformers' processors do with Pillow."""

from __future__ import annotations

import math
from typing import NamedTuple

from PIL import Image

from inference_svc.pictures.processor import MAX_RATIO, MAX_SIDE, Form, Processor
from inference_svc.pictures.sizes import Size

MAX_PADDING = 3
"""How many times as many pixels as a picture may have its square may have, if it is padded to one:
so a process has memory for both."""


class TooLong(ValueError):
    """A picture is so narrow that it would have too many pixels in the size of the model."""


class Tiling(NamedTuple):
    """Tiles of the size `tile`, one behind the other: RGB, a byte each, row by row. A picture that
    is cut has `rows` and `columns` of them, and one of the whole; otherwise both are 0, and there
    is one."""

    pixels: bytes
    tile: Size
    rows: int = 0
    columns: int = 0


def make_tiles(picture: Image.Image, processor: Processor, max_pixels: int) -> Tiling:
    """Returns the tiles of an RGB picture. Raises TooLong if it would have more than `max_pixels`
    on the way, or MAX_PADDING times as many in a square."""
    if processor.form is Form.WHOLE:
        return _one(_whole(picture, processor, max_pixels))
    if processor.form is Form.FREE:
        find = _within_square if processor.longest else _free_size
        find = _filling_size if processor.fills else find
        return _one(_resized(picture, find(picture, processor), processor))
    return _split(picture, processor)


def _one(picture: Image.Image) -> Tiling:
    return Tiling(picture.tobytes(), Size(picture.height, picture.width))


def _within_square(picture: Image.Image, processor: Processor) -> Size:
    """Returns the size in which no side is longer than `longest`, and both are multiples of a
    factor, rounded up."""
    height, width = picture.height, picture.width
    ratio = max(height / processor.longest, width / processor.longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not (height and width):
        raise TooLong
    factor = processor.factor
    return Size(*(-(-side // factor) * factor for side in (height, width)))


def _filling_size(picture: Image.Image, processor: Processor) -> Size:
    """Returns the largest size of about the same proportions whose sides are multiples of a factor
    and whose pixels are within bounds."""
    height, width = picture.height, picture.width
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


def _free_size(picture: Image.Image, processor: Processor) -> Size:
    """Returns the size in which both sides are multiples of a factor, and pixels within bounds."""
    width, height = picture.size
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


def _whole(picture: Image.Image, processor: Processor, max_pixels: int) -> Image.Image:
    if processor.padding is not None and picture.width != picture.height:
        side = max(picture.size)
        _check(Size(side, side), MAX_PADDING * max_pixels)
        square = Image.new("RGB", (side, side), processor.padding)
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
        picture = square
    size = processor.size or _by_shorter(picture, processor.shortest)
    _check(size, max_pixels)
    picture = _resized(picture, size, processor)
    if not processor.crops:
        return picture
    side = processor.tile_size
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    # Where it is smaller than a tile the rest is black.
    return picture.crop((left, top, left + side, top + side))


def _by_shorter(picture: Image.Image, shortest: int) -> Size:
    """Returns the size in which the shorter side is `shortest`."""
    width, height = picture.size
    longest = int(shortest * max(width, height) / min(width, height))
    return Size(longest, shortest) if width <= height else Size(shortest, longest)


def _check(size: Size, max_pixels: int) -> None:
    if size.height * size.width > max_pixels:
        raise TooLong


def _split(picture: Image.Image, processor: Processor) -> Tiling:
    tile = processor.tile_size
    picture = _resized(picture, _by_longer(picture, processor.longest), processor)
    if not processor.splits:
        return _one(_resized(picture, Size(tile, tile), processor))
    picture = _resized(picture, _in_tiles(picture, tile), processor)
    rows, columns = picture.height // tile, picture.width // tile
    if rows == columns == 1:
        return _one(picture)
    parts = [
        picture.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile)).tobytes()
        for y in range(rows)
        for x in range(columns)
    ]
    parts.append(_resized(picture, Size(tile, tile), processor).tobytes())
    return Tiling(b"".join(parts), Size(tile, tile), rows, columns)


def _by_longer(picture: Image.Image, longest: int) -> Size:
    """Returns the size in which the longer side is `longest`, at most MAX_SIDE, and the other one
    even."""
    width, height = picture.size
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


def _in_tiles(picture: Image.Image, tile: int) -> Size:
    """Returns the size in which both sides are multiples of a tile's."""
    width, height = picture.size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return Size(height, width)


def _resized(picture: Image.Image, size: Size, processor: Processor) -> Image.Image:
    resample = Image.Resampling(processor.filter)
    return picture.resize((size.width, size.height), resample=resample)
