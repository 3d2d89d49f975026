"""The sizes of tiles, and the tokens that a tower makes of them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

STRIP, MAX_SLICE = 32, 1024
"""The tokens of a strip of a tile, which is the least that a tower computes at once, and the most
tokens of strips that follow each other. A strip of one cell, or of one window, may have more."""


class Size(NamedTuple):
    height: int
    width: int


class TileForm(NamedTuple):
    """The form of the tiles that a tower reads: squares of `tile_size` pixels, or tiles of any size
    (0), whose sides are whole cells. A cell is `merge` x `merge` patches of `patch_size` pixels,
    which become one token of a prompt. In the tower a tile has `num_added` tokens before its
    patches, and the connector reads all but the first `num_dropped`. A patch is `frames` times the
    same picture. `window` is the side of windows, in cells; 0: there are none. A side may have
    `most_per_side` patches; 0: any number.
    """

    tile_size: int
    patch_size: int
    merge: int = 1
    num_added: int = 0
    num_dropped: int = 0
    frames: int = 1
    window: int = 0
    most_per_side: int = 0

    @property
    def cell_size(self) -> int:
        """The side of a cell, in pixels."""
        return self.patch_size * self.merge

    @property
    def whole(self) -> Size:
        """The size of all tiles, of a tower that reads squares of one size."""
        assert self.tile_size, "tiles have any size"
        return Size(self.tile_size, self.tile_size)

    def grid(self, tile: Size) -> Size:
        """Returns the rows and columns of a tile's patches; the last pixels may belong to none."""
        return Size(tile.height // self.patch_size, tile.width // self.patch_size)

    def cells(self, tile: Size) -> Size:
        """Returns the rows and columns of a tile's cells."""
        return Size(*(each // self.merge for each in self.grid(tile)))

    def inner_tokens(self, tile: Size) -> int:
        """Returns the tokens of a tile in the tower."""
        rows, columns = self.grid(tile)
        return rows * columns + self.num_added

    def tokens(self, tile: Size) -> int:
        """Returns the tokens of a prompt that stand for a tile."""
        return (self.inner_tokens(tile) - self.num_dropped) // self.merge**2

    def max_tokens(self, num_pixels: int) -> int:
        """Returns the most tokens of a prompt for a tile of at most so many pixels."""
        return num_pixels // self.cell_size**2 + self.num_added

    def strips(self, tile: Size) -> tuple[tuple[int, int], ...]:
        """Returns the strips of a tile's tokens, each [start, end): of whole windows, or whole
        cells, some STRIP tokens each."""
        return _strips(self, tile)

    def max_part(self, num_tokens: int) -> int:
        """Returns the most tokens that a tower computes at once, of tiles of at most so many: a
        strip has whole cells, however large they are."""
        return min(num_tokens, max(MAX_SLICE, self.num_dropped + self.merge**2))

    def windows(self, tile: Size) -> list[int]:
        """Returns the numbers of patches of a tile's windows, row by row; of a tile without windows
        the number of all."""
        rows, columns = self.cells(tile)
        if not self.window:
            return [rows * columns * self.merge**2]
        sides = (
            [min(self.window, count - first) for first in range(0, count, self.window)]
            for count in (rows, columns)
        )
        heights, widths = sides
        return [height * width * self.merge**2 for height in heights for width in widths]


@lru_cache(maxsize=64)
def _strips(form: TileForm, tile: Size) -> tuple[tuple[int, int], ...]:
    total = form.inner_tokens(tile)
    if not form.window:
        step = max(STRIP // form.merge**2, 1) * form.merge**2
        borders = [0, *range(form.num_dropped + step, total, step), total]
        return tuple(pairwise(borders))
    found: list[tuple[int, int]] = []
    start = end = 0
    for size in form.windows(tile):
        if start < end and end + size - start > STRIP:
            found.append((start, end))
            start = end
        end += size
    return (*found, (start, end))
