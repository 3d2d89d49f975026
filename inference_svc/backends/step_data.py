"""A step as plain numbers: all that another rank needs to compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_svc.backends.prompt_runs import pooled_runs, scored_runs, scored_slices
from inference_svc.backends.slot_runs import (
    SlotRuns,
    last_slots,
    scored_indices,
    scored_slot_runs,
    slot_runs,
)
from inference_svc.core import BatchRow
from inference_svc.model.recurrent_states import Segment, StateCopy, segments_of, spare_slot
from inference_svc.pictures.positions import NUM_AXES, PicturePositions
from inference_svc.pictures.prompt import PromptPicture


class ScoredSlice(NamedTuple):
    """Tokens that are scored together: their numbers in the step, and the slots that compute
    them."""

    indices: list[int]
    runs: SlotRuns


class StepData(NamedTuple):
    """The rows of a step: their tokens one behind the other, and of each row its first position,
    its number of tokens, its pages, and the slot of its last token. `runs` are of all tokens. Of a
    model with recurrent layers, `segments` say where states are, and `state_copies` are made before
    the step. `returns_experts`: the experts of all tokens are needed, also in the last layer.
    `is_pooled`: so are the final hidden states. `plan`: see `RankBackend.plan`. `pictures` are the
    tokens [start, end) that stand for pictures, whose embeddings come separately. `axes` are the
    tokens' positions along all axes, int64 [3, T], if a prompt has pictures and they count; None:
    they are equal along all axes."""

    token_ids: list[int]
    starts: list[int]
    counts: list[int]
    page_ids: list[list[int]]
    runs: SlotRuns
    last_slots: list[int]
    scored: list[ScoredSlice]
    segments: list[Segment]
    state_copies: list[StateCopy]
    returns_experts: bool = False
    plan: Sequence[int] = ()
    is_pooled: bool = False
    pictures: Sequence[tuple[int, int]] = ()
    axes: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[BatchRow],
        max_scored: int,
        num_states: int,
        places: PicturePositions | None = None,
        *,
        returns_experts: bool = False,
    ) -> StepData:
        """Returns the data of a batch's rows, which are scored at most so many tokens at once.
        `num_states` are the states that sequences may own; 0: the model has none. `places`, if
        there are any, are the positions of pictures. The pictures' tokens are to be added."""
        sequences, starts, counts, _ = zip(*rows, strict=True)
        token_ids: list[int] = []
        for sequence, start, count, _ in rows:
            token_ids += sequence.token_ids[start : start + count]
        scored = [
            ScoredSlice(scored_indices(part), scored_slot_runs(part))
            for part in scored_slices(scored_runs(rows), max_scored)
        ]
        pictures = [sequence.request.pictures for sequence in sequences]
        segments: list[Segment] = []
        for sequence, start, count, _ in rows if num_states else ():
            segments += segments_of(sequence, start, count, spare_slot(num_states))
        return cls(
            token_ids,
            list(starts),
            list(counts),
            [sequence.page_ids for sequence in sequences],
            slot_runs(sequences, starts, counts),
            last_slots(sequences, starts, counts),
            scored,
            segments,
            [],
            returns_experts,
            is_pooled=bool(pooled_runs(rows)),
            axes=None if places is None else _axes_of(pictures, starts, counts, places),
        )


def _axes_of(
    pictures: Sequence[Sequence[PromptPicture]],
    starts: Sequence[int],
    counts: Sequence[int],
    places: PicturePositions,
) -> NDArray[np.int64] | None:
    """Returns `StepData.axes` of rows with these pictures."""
    if not any(pictures):
        return None
    lengths = np.array(counts)
    ends = lengths.cumsum()
    own = np.arange(ends[-1]) + np.repeat(np.array(starts) - ends + lengths, lengths)
    found = np.empty((NUM_AXES, len(own)), dtype=np.int64)
    places.fill(found, own, zip(pictures, counts, strict=True))
    return found
