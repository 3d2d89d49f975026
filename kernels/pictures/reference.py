"""The definitions of towers' own operations, in torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.elementwise.reference import rms_norm

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
    channels = torch.arange(CHANNELS, device=pixels.device)
    return values[channels, cut].permute(0, 3, 1, 2)


def by_pixel(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns patches pixel by pixel.

    Args:
        patches: fp32 [P, CHANNELS, side, side].
        dtype: The type to round to.

    Returns:
        [P, side * side * CHANNELS] of this dtype.
    """
    return patches.permute(0, 2, 3, 1).flatten(1).to(dtype)


def add_blend(x: Tensor, table: Tensor, rows: Tensor, weights: Tensor) -> None:
    """x[t] += the sum of table[rows[t, i]] * weights[t, i], which is rounded first.

    Args:
        x: [T, size].
        table: [S, size] of x's dtype.
        rows: int64 [T, N].
        weights: fp32 [T, N].
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


def clip(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Returns x between two bounds, fp32 [], each rounded to x's dtype; NaN stays NaN. x: [T, size]
    -> the same."""
    return x.clamp(least.to(x.dtype), most.to(x.dtype))


def arrange_heads(
    qkv: Tensor, weights: Sequence[Tensor], eps: float, quarters: Sequence[int] | None
) -> None:
    """Norms each head as `rms_norm` does, and then orders the quarters of queries' and keys', in
    place.

    Args:
        qkv: [T, 3 * heads * head_dim]: queries, keys and values of all heads.
        weights: The norms of queries, keys and values, fp32 [head_dim], or one of each token, [T,
            head_dim].
        eps: Added to the mean square.
        quarters: The quarters of a head in their new order. None: they stay where they are.
    """
    heads = qkv.unflatten(1, (3, -1, weights[0].shape[-1]))
    for kind, weight in enumerate(weights):
        normed = rms_norm(heads[:, kind], weight, eps)
        if quarters is not None and kind < 2:
            parts = normed.chunk(4, dim=2)
            normed = torch.cat([parts[each] for each in quarters], 2)
        heads[:, kind] = normed


def standardise(x: Tensor, scale: float, bias: Tensor | None, factor: Tensor | None) -> Tensor:
    """Returns (scale * x - bias) * factor, in fp32 and rounded once; without both scale * x.

    Args:
        x: [cells, size].
        scale: Factor of x.
        bias: fp32 [size], or None.
        factor: As bias; both are there, or neither.

    Returns:
        [cells, size] of x's dtype.
    """
    scaled = x.float() * scale
    if bias is not None and factor is not None:
        scaled = (scaled - bias) * factor
    return scaled.to(x.dtype)
