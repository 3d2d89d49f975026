"""The definitions of towers' own operations, in torch."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

CHANNELS = 3
"""Red, green and blue."""


class Merging(enum.Enum):
    """The row that the patches of a cell become. SIDE_BY_SIDE: one patch behind the other.
    TAKING_TURNS: the first element of each patch, then the second of each. MEAN: their mean."""

    SIDE_BY_SIDE = "side_by_side"
    TAKING_TURNS = "taking_turns"
    MEAN = "mean"


def cut_patches(pixels: Tensor, values: Tensor, rows: Tensor, columns: Tensor, side: int) -> Tensor:
    """Returns patches of a tile, whose bytes become numbers.

    Args:
        pixels: uint8 [height, width, CHANNELS].
        values: The number of each byte of each channel, fp32 [CHANNELS, 256].
        rows: The row of each patch in the grid of patches, int64 [P].
        columns: As rows.
        side: The side of a patch, in pixels.

    Returns:
        fp32 [P, CHANNELS, side, side].
    """
    height, width = (each // side for each in pixels.shape[:2])
    whole = pixels[: height * side, : width * side]
    cut = whole.reshape(height, side, width, side, CHANNELS)[rows, :, columns].long()
    return values[torch.arange(CHANNELS), cut].permute(0, 3, 1, 2)


def add_blend(x: Tensor, table: Tensor, rows: Tensor, weights: Tensor) -> None:
    """x[t] += the sum of table[rows[t, i]] * weights[t, i], which is rounded first.

    Args:
        x: [T, size].
        table: [S, size] of x's dtype.
        rows: int64 [T, 4].
        weights: fp32 [T, 4].
    """
    x += (table[rows] * weights[:, :, None]).sum(1).to(x.dtype)


def merge_patches(x: Tensor, count: int, merging: Merging) -> Tensor:
    """Returns one row of the `count` patches of each cell, which follow each other.

    Args:
        x: [cells * count, size].
        count: Patches of a cell.
        merging: The row that they become.

    Returns:
        [cells, count * size] of x's dtype, or, of means, [cells, size].
    """
    cells = x.view(-1, count, x.shape[1])
    if merging is Merging.MEAN:
        return cells.float().mean(1).to(x.dtype)
    if merging is Merging.TAKING_TURNS:
        cells = cells.transpose(1, 2)
    return cells.reshape(len(cells), -1)
