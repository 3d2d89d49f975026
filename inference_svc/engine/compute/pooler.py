"""Sums the final hidden states of prompts that are pooled, for each run of tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from inference_svc.backends.base import Hidden
from inference_svc.core import Sequence
from inference_svc.results.pooling import HiddenSum


class SequenceSum(NamedTuple):
    """The sum of a run of a sequence's tokens: no numbers unless it `is_sound`."""

    sequence: Sequence
    total: HiddenSum
    is_sound: bool = True


def pool(slices: Iterable[Hidden]) -> Iterator[SequenceSum]:
    """Yields the sum of each run of each slice, in fp32, on the host."""
    for runs, states in slices:
        sizes = [run.num_tokens for run in runs]
        # Summed on the device, and copied at once.
        sums = torch.stack([each.sum(dim=0) for each in states.float().split(sizes)]).cpu()
        sound = sums.isfinite().all(dim=1).tolist()
        for run, total, is_sound in zip(runs, sums.numpy(), sound, strict=True):
            first = run.position - 1
            part = HiddenSum(first, run.num_tokens, total.tobytes())
            yield SequenceSum(run.sequence, part, is_sound)
