"""A batch as the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.core import Batch, BatchRow
from inference_svc.model.recurrent_states import RecurrentPlan, RecurrentStates
from inference_svc.pictures.positions import NUM_AXES, PicturePositions
from kernels.attention import AttentionPlan


class Blend(NamedTuple):
    """Sums of N rows of a table, one for each token: the numbers of the rows, int64 [T, N], and
    their weights, fp32 [T, N]."""

    rows: Tensor
    weights: Tensor


class PlacedRows(NamedTuple):
    """Embeddings of a picture [N, hidden_size], in the model's dtype, of the step's tokens from
    `start` on; behind them, side by side, the ones of the tower's taps."""

    start: int
    rows: Tensor

    @property
    def tokens(self) -> tuple[int, int]:
        """The step's tokens [start, end)."""
        return self.start, self.start + len(self.rows)

    def of_tap(self, tap: int, size: int) -> Tensor:
        """Returns the embeddings of a tap, [N, size]."""
        return self.rows[:, (tap + 1) * size : (tap + 2) * size]


class MaskedRows(NamedTuple):
    """Embeddings as `PlacedRows` has them, of all of a step's T tokens [T, N], of which the ones in
    the `mask`, bool [T, 1], count: so a recorded step has them at fixed addresses."""

    mask: Tensor
    rows: Tensor

    def put(self, out: Tensor) -> None:
        """Puts the embeddings in the place of tokens' own, `out` [T, size]."""
        torch.where(self.mask, self.rows[:, : out.shape[1]], out, out=out)

    def add(self, out: Tensor, tap: int) -> None:
        """Adds the embeddings of a tap to `out` [T, size]."""
        size = out.shape[1]
        # Rows of earlier steps may be no numbers, which times 0 are none either.
        torch.where(self.mask, out + PlacedRows(0, self.rows).of_tap(tap, size), out, out=out)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The decoder's inputs of one step: T tokens, in the order of the batch's rows.

    `token_ids` and `positions` are int64 [T], or positions [axes, T]. `logit_rows`, int64 [rows],
    holds the index of each row's last token: only these get logits, which say whether the row is
    computed soundly, also where it does not sample. `attention` holds where keys and values are
    stored and the positions that each token attends to; `recurrent`, of a model with such layers,
    where states are. `pictures` are embeddings that take the place of tokens' own, as do those that
    are `masked`, of a recorded step. `types`, int64
    [T], are token types; None: all are 0. A step of a vision tower computes a `part` of a tile's
    tokens, within whose windows `attention` is, and begins with `patches` instead of token ids:
    fp32 [patches, 3, side, side]. If positions are blended, `blend` has them.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionPlan
    recurrent: RecurrentPlan | None = None
    pictures: tuple[PlacedRows, ...] = ()
    masked: MaskedRows | None = None
    patches: Tensor | None = None
    part: slice | None = None
    blend: Blend | None = None
    types: Tensor | None = None

    @classmethod
    def build(
        cls,
        batch: Batch,
        page_size: int,
        device: torch.device | str = "cpu",
        states: RecurrentStates | None = None,
        places: PicturePositions | None = None,
        mutual: Sequence[tuple[int, int]] = (),
    ) -> StepInputs:
        """Returns the inputs of a batch. `places`, if there are any, are the positions of pictures;
        `mutual` are as in `AttentionPlan.build`."""
        token_ids: list[int] = []
        for row in batch.rows:
            token_ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        starts = np.asarray([row.start for row in batch.rows], dtype=np.int64)
        counts = np.asarray([row.num_tokens for row in batch.rows], dtype=np.int64)
        page_ids = [row.sequence.page_ids for row in batch.rows]
        plan = None if states is None else states.plan(batch.rows)
        made = cls.of(token_ids, starts, counts, page_ids, page_size, device, plan, mutual)
        if (types := token_types(batch.rows)) is not None:
            made = replace(made, types=torch.from_numpy(types).to(device))
        if places is None:
            return made
        own = made.positions.cpu().numpy()
        found = np.empty((NUM_AXES, len(own)), dtype=np.int64)
        places.fill(
            found, own, [(row.sequence.request.pictures, row.num_tokens) for row in batch.rows]
        )
        return replace(made, positions=torch.from_numpy(found).to(device))

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        page_ids: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        recurrent: RecurrentPlan | None = None,
        mutual: Sequence[tuple[int, int]] = (),
    ) -> StepInputs:
        """Returns the inputs of rows of so many tokens, `counts`, whose first have the positions
        `starts`: int64 [rows] both. `page_ids` are each row's pages."""
        ends = np.cumsum(counts)
        assert len(token_ids) == ends[-1], "a row has tokens that are not known yet"
        positions = np.arange(len(token_ids)) + np.repeat(starts - (ends - counts), counts)
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
            positions=torch.from_numpy(positions).to(device),
            logit_rows=torch.from_numpy(ends - 1).to(device),
            attention=AttentionPlan.build(starts, counts, page_ids, page_size, device, mutual),
            recurrent=recurrent,
        )


def token_types(rows: Sequence[BatchRow]) -> NDArray[np.int64] | None:
    """Returns the type of each token, int64 [T], in the order of the rows: 1 in the second text of
    a pair; None: all are 0."""
    if not any(row.sequence.request.second_start for row in rows):
        return None
    types = []
    for row in rows:
        own = np.zeros(row.num_tokens, dtype=np.int64)
        if second := row.sequence.request.second_start:
            own[max(second - row.start, 0) :] = 1
        types.append(own)
    return np.concatenate(types)
