"""The inputs of a part of a tile at fixed addresses, and the shapes of attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inference_svc.model.description import Decoder
from inference_svc.model.encoder.tiles import TilePart, TilePlan
from inference_svc.model.encoder.towers import attention_of
from inference_svc.model.operations import Rows
from inference_svc.model.rope import Axes
from kernels.attention.native import StepRows
from kernels.attention.native_both_ways import BothWaysShape
from kernels.pictures.native import MAX_BLENDED


class PartArrays:
    """The inputs of parts of up to `max_tokens` tokens of a tile; a `StepMemory`.

    `positions` are rows of the table of positions, int64 [T], or, of tiles of any size,
    `axis_positions`, int64 [2, T]. `patch_rows` and `patch_columns`, int64 [P], say which patches
    are read; `blend` has rows and weights, int64 and fp32 [T, MAX_BLENDED]. `windows` are their
    number and their first tokens, and `tile` one row, of all tokens of the tile: its end is said
    before attention runs. Counts are int32 [1]: `num_added` are the tokens before the patches that
    are of this part.
    """

    def __init__(self, max_tokens: int) -> None:
        self.positions = torch.zeros(max_tokens, dtype=torch.int64)
        self.token_ids = self.positions
        self.axis_positions = torch.zeros(2, max_tokens, dtype=torch.int64)
        self.logit_rows = torch.zeros(max_tokens, dtype=torch.int64)
        self.patch_rows = torch.zeros(max_tokens, dtype=torch.int64)
        self.patch_columns = torch.zeros(max_tokens, dtype=torch.int64)
        self.blend = (
            torch.zeros(max_tokens, MAX_BLENDED, dtype=torch.int64),
            torch.zeros(max_tokens, MAX_BLENDED, dtype=torch.float32),
        )
        self.num_patches, self.num_added = _count(), _count()
        self.windows = _count(), torch.zeros(max_tokens + 1, dtype=torch.int32)
        self.tile = _count(1), torch.zeros(2, dtype=torch.int32)
        self._counts = {each: _count() for each in (Rows.TOKENS, Rows.LOGITS, Rows.CELLS)}

    @property
    def rows(self) -> StepRows:
        raise AssertionError("a tower stores no keys")

    def count(self, rows: Rows) -> Tensor:
        return self._counts[rows]

    def positions_along(self, axes: Axes | None) -> tuple[Tensor, Tensor | None]:
        assert axes is not None, "patches have a row and a column"
        return self.axis_positions, axes.of_pairs.int()

    def fill(self, plan: TilePlan, part: TilePart) -> dict[Rows, int]:
        """Describes a part. Returns the numbers of its rows."""
        own, count, added = slice(part.start, part.end), part.num_tokens, plan.form.num_added
        positions = plan.positions[..., own]
        target = self.positions if positions.dim() == 1 else self.axis_positions
        target[..., :count] = positions
        patches = plan.patches[:, max(part.start - added, 0) : part.end - added]
        num_patches = patches.shape[1]
        self.patch_rows[:num_patches], self.patch_columns[:num_patches] = patches
        self.num_patches[0], self.num_added[0] = num_patches, count - num_patches
        if plan.blend is not None:
            for mine, whole in zip(self.blend, plan.blend, strict=True):
                mine[:count, : whole.shape[1]] = whole[own]
        self.logit_rows[: part.num_rows] = torch.arange(part.first_row, count)
        num_windows, starts = self.windows
        num_windows[0] = len(part.window_starts) - 1
        starts[: len(part.window_starts)] = torch.from_numpy(part.window_starts)
        counts = {Rows.TOKENS: count, Rows.LOGITS: part.num_rows, Rows.CELLS: len(part.cells)}
        for rows, number in counts.items():
            self._counts[rows][0] = number
        return counts

    @property
    def num_bytes(self) -> int:
        return self.bytes_of(len(self.positions))

    @staticmethod
    def bytes_of(max_tokens: int) -> int:
        """Returns the memory for parts of so many tokens."""
        of_blend = MAX_BLENDED * (torch.int64.itemsize + torch.float32.itemsize)
        return max_tokens * (6 * torch.int64.itemsize + of_blend + torch.int32.itemsize) + 40


def tower_shapes(tower: Decoder, dtype: torch.dtype, most: int) -> Iterator[BothWaysShape]:
    """Yields the shapes of attention in a tower of parts of up to so many tokens. Cells that are
    packed before take no memory of threads."""
    layers = attention_of(tower)
    has_windows = any(each.in_windows for each in layers)
    for size in sorted({each.head_dim for each in layers}):
        yield BothWaysShape(size, dtype.itemsize, most if has_windows else 1)


def _count(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)
