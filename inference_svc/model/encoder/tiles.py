"""The order in which a tower computes the patches of a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.host.copies import to_device
from inference_svc.model.description import Patches, Positions
from inference_svc.model.inputs import Blend
from inference_svc.pictures.sizes import MAX_SLICE, Size, TileForm


@dataclass(frozen=True, slots=True)
class TilePart:
    """The tokens [start, end) of a tile, `num_strips` of it, which a tower computes at once. Their
    windows, if layers have any, begin at `window_starts`, int64 [windows + 1], counted from
    `start`, of which the last is the end. The connector reads the tokens from `first_row` on,
    counted from `start`, and `cells`, int64 [M], are the places of its outputs among the tile's."""

    start: int
    end: int
    num_strips: int
    window_starts: NDArray[np.int64]
    first_row: int
    cells: Tensor

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_rows(self) -> int:
        """The tokens that the connector reads."""
        return self.num_tokens - self.first_row


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tokens of a tile in the tower's order: window by window, cell by cell.

    `patches` are the rows and columns of patches, int64 [2, P]. `positions` are the rows of the
    table of positions, int64 [T]; of tiles of any size `patches`. `cells` are the places of cells,
    and `windows` the borders of windows. `blend` has the rows of a table that is a square.
    `host_rows` are the rows of patches, int64 [P], on the host.
    """

    form: TileForm
    patches: Tensor
    positions: Tensor
    cells: Tensor
    strips: tuple[tuple[int, int], ...]
    windows: NDArray[np.int64]
    host_rows: NDArray[np.int64]
    blend: Blend | None = None

    @property
    def num_tokens(self) -> int:
        return self.strips[-1][1]

    def on(self, device: torch.device) -> TilePlan:
        """Returns the plan with its tensors on a device."""
        blend = self.blend
        return replace(
            self,
            patches=to_device(self.patches.numpy(), device),
            positions=to_device(self.positions.numpy(), device),
            cells=to_device(self.cells.numpy(), device),
            blend=None
            if blend is None
            else Blend(*(to_device(each.numpy(), device) for each in blend)),
        )

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
        if form.tile_size:  # it may have other tokens than the ones of cells
            order = torch.arange(form.tokens(tile))
        windows = np.cumsum([0, *form.windows(tile)]) if form.window else np.zeros(1, np.int64)
        blend = None if table is None else _blend(form.grid(tile), found, table)
        strips, host_rows = form.strips(tile), found[0].numpy()
        return cls(form, found, positions, order, strips, windows, host_rows, blend)

    def part(self, first: int, num_strips: int, most_tokens: int = MAX_SLICE) -> TilePart:
        """Returns strips from `first` on, at most so many: one, or as many as have at most
        `most_tokens`."""
        start, end = self.strips[first]
        last = first + 1
        while last < min(first + num_strips, len(self.strips)):
            if self.strips[last][1] - start > most_tokens:
                break
            end = self.strips[last][1]
            last += 1
        dropped, cell = self.form.num_dropped, self.form.merge**2
        first_row = max(dropped - start, 0)
        own = slice((start + first_row - dropped) // cell, (end - dropped) // cell)
        inner = self.windows[(self.windows >= start) & (self.windows <= end)] - start
        return TilePart(start, end, last - first, inner, first_row, self.cells[own])


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
