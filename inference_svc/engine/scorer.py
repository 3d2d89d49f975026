"""Turns the logits of a prompt's tokens into their log probabilities, of the model's own
distribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference_svc.backends.base import Scored
from inference_svc.core import PackedLogprobs, ScoredRun, Sequence
from inference_svc.host.copies import to_device


class SequenceScores(NamedTuple):
    """What a step has scored of a sequence's prompt."""

    sequence: Sequence
    logprobs: PackedLogprobs


def score(slices: Iterable[Scored]) -> Iterator[SequenceScores]:
    """Yields the log probabilities of each run of each slice, on the host."""
    for runs, logits in slices:
        yield from _score(runs, logits)


def _score(runs: list[ScoredRun], logits: Tensor) -> Iterator[SequenceScores]:
    """One search finds the most likely tokens of all runs, as many as any of them asks for."""
    tokens = [
        token
        for sequence, position, _, count in runs
        for token in sequence.token_ids[position : position + count]
    ]
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, to_device(tokens, logits.device).unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1, dtype=torch.int32)
    most = max(_top_k(run) for run in runs)
    top = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    whole = PackedLogprobs(
        0,
        token_ids=np.array(tokens, np.int32),
        logprobs=own.squeeze(1).cpu().numpy(),
        ranks=ranks.cpu().numpy(),
        top_ids=top.indices.to(torch.int32).cpu().numpy(),
        top_logprobs=top.values.cpu().numpy(),
    )
    start = 0
    for run in runs:
        end, top_k = start + run.num_tokens, _top_k(run)
        part = whole.slice(start, end)
        # Copies, as a view would hold all that lies beside it.
        yield SequenceScores(
            run.sequence,
            PackedLogprobs(
                run.position,
                *(part.token_ids.copy(), part.logprobs.copy(), part.ranks.copy()),
                *(part.top_ids[:, :top_k].copy(), part.top_logprobs[:, :top_k].copy()),
            ),
        )
        start = end


def _top_k(run: ScoredRun) -> int:
    return run.sequence.request.sampling.prompt_logprobs or 0
