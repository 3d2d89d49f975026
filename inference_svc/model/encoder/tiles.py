"""The order in which a tower computes the patches of a tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_svc.model.description import Patches, Positions
from inference_svc.model.inputs import Blend
from inference_svc.pictures.sizes import Size, TileForm
from kernels.attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class TilePart:
    """The tokens [start, end) of a tile, which a tower computes at once, and the plan of attention
    within their windows. `rows`, int64 [N], are the ones that the connector reads, counted from
    `start`, and `cells`, int64 [M], the places of its outputs among the tile's."""

    start: int
    end: int
    windows: AttentionPlan
    rows: Tensor
    cells: Tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tokens of a tile in the tower's order: window by window, cell by cell.

    `patches` are the rows and columns of patches, int64 [2, P]. `positions` are the rows of the
    table of positions, int64 [T]; of tiles of any size `patches`. `blend` has the rows of a table
    that is a square.
    """

    patches: Tensor
    positions: Tensor
    parts: tuple[TilePart, ...]
    blend: Blend | None = None

    @property
    def num_tokens(self) -> int:
        return self.parts[-1].end

    @classmethod
    def of(cls, patches: Patches, tile: Size, table: Positions | None = None) -> TilePlan:
        """Returns the plan of a tile. `table` is the tower's table of positions, if it has one."""
        form = patches.form
        cells, order = _cells(form, tile)
        merge = form.merge
        inner = torch.arange(merge)
        rows = (cells[0][:, None, None] * merge + inner[:, None]).expand(-1, -1, merge).flatten()
        columns = (cells[1][:, None, None] * merge + inner).expand(-1, merge, -1).flatten()
        places = rows * form.grid(tile).width + columns
        found = torch.stack((rows, columns))
        positions = _positions(patches, places) if form.tile_size else found
        windows = form.windows(tile) if form.window else []
        parts = tuple(_part(form, order, windows, *part) for part in form.slices(tile))
        blend = None if table is None else _blend(form.grid(tile), found, table)
        return cls(found, positions, parts, blend)


def _cells(form: TileForm, tile: Size) -> tuple[Tensor, Tensor]:
    """Returns the rows and columns of cells in the tower's order, int64 [2, cells], and their
    places, counted row by row."""
    height, width = form.cells(tile)
    places = torch.arange(height * width)
    rows, columns = places // width, places % width
    if form.window:
        window = form.window
        own = rows // window * -(-width // window) + columns // window
        order = torch.argsort(own, stable=True)
        return torch.stack((rows[order], columns[order])), order
    return torch.stack((rows, columns)), places


def _part(form: TileForm, order: Tensor, windows: list[int], start: int, end: int) -> TilePart:
    """Returns a part of a tile whose cells are in this order, and windows so large."""
    counts = np.array([end - start])
    if windows:
        borders = np.cumsum([0, *windows])
        first, last = np.searchsorted(borders, (start, end))
        counts = np.diff(borders[first : last + 1])
    zeros = np.zeros(len(counts), np.int64)
    plan = AttentionPlan.build(zeros, counts, [[0]] * len(counts), int(counts.max()), "cpu")
    dropped = form.num_dropped
    rows = torch.arange(dropped, end - start)
    first, count = start // form.merge**2, len(rows) // form.merge**2
    cells = order[first : first + count]
    if form.tile_size:  # it may have other tokens than the ones of cells
        cells = torch.arange(count)
    return TilePart(start, end, plan, rows, cells)


def _positions(patches: Patches, places: Tensor) -> Tensor:
    """Returns the rows of the table of positions of a square's tokens."""
    found = _by_fractions(patches.form)[places] if patches.has_fractions else places
    added = patches.form.num_added
    return torch.cat((torch.arange(added), found + added))


def _blend(grid: Size, patches: Tensor, table: Positions) -> Blend | None:
    """Returns the rows of the table that are blended for each patch, and their weights. Of a
    square these are the rows around the patch: the square's corners are those of the grid, and
    weights are linear between its rows and columns."""
    if table.of_axes:
        both = torch.stack((patches[1], patches[0] + table.num_rows // 2), 1)
        return Blend(both, torch.ones(both.shape))
    if not (side := table.side):
        return None
    rows: list[Tensor] = []
    weights: list[Tensor] = []
    for places, count in zip(patches, grid, strict=True):
        exact = places.float() * (side - 1) / max(count - 1, 1)
        before = exact.floor()
        both = before[:, None] + torch.arange(2)
        weights.append((1 - (exact[:, None] - both).abs()).clamp(min=0))
        rows.append(both.long().clamp(0, side - 1))
    found = rows[0][:, :, None] * side + rows[1][:, None, :]
    shares = weights[0][:, :, None] * weights[1][:, None, :]
    return Blend(found.flatten(1), shares.flatten(1))


def _by_fractions(form: TileForm) -> Tensor:
    """Returns the positions of a square's patches, int64 [patches], as transformers has them: where
    the patch's place in fp32 lies among the borders. For some numbers of patches, such as 19 each
    side, rounding moves patches to their neighbour's position, and the model was trained so."""
    count = form.tile_size // form.patch_size
    borders = torch.arange(1 / count, 1.0, 1 / count)
    step = 1.0 / torch.tensor(count)
    places = (torch.arange(count, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    found = torch.bucketize(places, borders, right=True)
    return (found[:, None] * count + found).flatten()
