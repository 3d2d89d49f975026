"""The positions of tokens in models that count the rows and columns of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_svc.pictures.prompt import PromptPicture
from inference_svc.pictures.sizes import TileForm

NUM_AXES = 3
"""Time, rows and columns."""


@dataclass(frozen=True, slots=True)
class PicturePositions:
    """Positions on three axes, which are equal for tokens of text. The cells of a picture, a tile
    of this form, have the time of its first token, and from there on count rows and columns. The
    text behind it goes on as if it had as many tokens as its longer side has cells.
    """

    tiles: TileForm

    def fill(
        self,
        out: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Iterable[tuple[Sequence[PromptPicture], int]],
    ) -> None:
        """Writes the positions of a step's tokens to `out`, int64 [3, T]. `positions` are their
        places in their sequences, int64 [T]. `rows` are the pictures and the number of tokens of
        each sequence of the step, in order."""
        out[:] = positions
        end = 0
        for pictures, count in rows:
            start, end = end, end + count
            if pictures:
                self._place(out[:, start:end], int(positions[start]), pictures)

    def _place(self, own: NDArray[np.int64], first: int, pictures: Sequence[PromptPicture]) -> None:
        """Moves the positions of a row that begins with the token `first` of its sequence."""
        for picture in pictures:
            if picture.start >= first + own.shape[1]:
                return
            height, width = self.tiles.cells(picture.tile)
            begin, end = max(0, picture.start - first), max(0, picture.end - first)
            inner = own[:, begin:end]
            cells = np.arange(inner.shape[1]) + (first + begin - picture.start)
            inner -= cells
            inner[1] += cells // width
            inner[2] += cells % width
            own[:, end:] -= height * width - max(height, width)
