"""Which slots compute which tokens of a step, for LoRA plans of its tokens and of its logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.core import BASE_SLOT, Sequence


class SlotRuns(NamedTuple):
    """The slots and the numbers of tokens of a batch's runs of tokens that one slot computes."""

    slots: list[int]
    lengths: list[int]


def slot_runs(
    sequences: Iterable[Sequence], starts: Iterable[int], counts: Iterable[int]
) -> SlotRuns:
    """Returns the runs of rows in batch order: one of each row, or two of a row that crosses its
    adapter's activation."""
    runs = SlotRuns([], [])
    for sequence, start, count in zip(sequences, starts, counts, strict=True):
        num_base = min(sequence.request.activation - start, count)
        if num_base > 0:
            runs.slots.append(BASE_SLOT)
            runs.lengths.append(num_base)
            count -= num_base
        if count:
            runs.slots.append(sequence.slot)
            runs.lengths.append(count)
    return runs


def last_slots(
    sequences: Iterable[Sequence], starts: Iterable[int], counts: Iterable[int]
) -> list[int]:
    """Returns the slot that computes the last token of each row."""
    return [
        sequence.slot if start + count > sequence.request.activation else BASE_SLOT
        for sequence, start, count in zip(sequences, starts, counts, strict=True)
    ]


def scored_slot_runs(runs: Iterable[ScoredRun]) -> SlotRuns:
    """Returns the slots that compute the tokens before the scored ones."""
    sequences, positions, _, counts = zip(*runs, strict=True)
    return slot_runs(sequences, [position - 1 for position in positions], counts)


def scored_indices(runs: Iterable[ScoredRun]) -> list[int]:
    """Returns the numbers in the step of the tokens whose logits are needed."""
    return [
        index for run in runs for index in range(run.first_index, run.first_index + run.num_tokens)
    ]
