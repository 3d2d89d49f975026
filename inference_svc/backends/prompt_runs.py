"""The tokens of prompts whose results a step computes: scores, or hidden states to be pooled.

Results of a token are of the position behind it: a prompt's next token is scored there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from inference_svc.core import BatchRow, Sequence
from inference_svc.results.base import Kind
from inference_svc.results.chosen_logits import ChosenLogitsOption


class ScoredRun(NamedTuple):
    """Neighbouring tokens of a prompt whose results a step computes: `num_tokens` from `position`
    on, whose logits follow from the tokens before each, of which the first is the step's token
    number `first_index`."""

    sequence: Sequence
    position: int
    first_index: int
    num_tokens: int


def scored_runs(rows: Iterable[BatchRow]) -> list[ScoredRun]:
    """Returns the tokens that a step scores, in batch order: of each scored prompt, the unscored
    successors of the tokens that the step computes."""
    runs, index = [], 0
    for sequence, start, num_tokens, _ in rows:
        first = max(start + 1, sequence.num_scored)
        count = min(start + num_tokens + 1, sequence.num_prompt) - first
        if count > 0:
            runs.append(ScoredRun(sequence, first, index + first - 1 - start, count))
        index += num_tokens
    return runs


def scored_slices(runs: Iterable[ScoredRun], max_tokens: int) -> Iterator[list[ScoredRun]]:
    """Yields runs in slices of at most so many tokens, in order."""
    part: list[ScoredRun] = []
    left = max_tokens
    for sequence, position, index, count in runs:
        while count:
            size = min(count, left)
            part.append(ScoredRun(sequence, position, index, size))
            position, index, count, left = position + size, index + size, count - size, left - size
            if not left:
                yield part
                part, left = [], max_tokens
    if part:
        yield part


def _pools_hidden(sequence: Sequence) -> bool:
    wanted = sequence.request.wanted
    return wanted.kind is not Kind.GENERATE and wanted.get(ChosenLogitsOption) is None


def pooled_runs(rows: Iterable[BatchRow]) -> list[ScoredRun]:
    """Returns the tokens whose final hidden states a step returns, in batch order: of each prompt
    that is pooled, those that the step computes and that were not returned yet."""
    runs, index = [], 0
    for sequence, start, num_tokens, samples in rows:
        if not samples and sequence.end_pooled and _pools_hidden(sequence):
            first = max(start, sequence.next_pooled)
            count = min(start + num_tokens, sequence.end_pooled) - first
            if count > 0:
                runs.append(ScoredRun(sequence, first + 1, index + first - start, count))
        index += num_tokens
    return runs
