"""The results of a step for prompts that are pooled: one for each, of whatever slices."""

from __future__ import annotations

import numpy as np
import torch

from inference_svc.backends.base import Hidden
from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.compute.scorer import pool
from inference_svc.results.base import Option, Wanted
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import HiddenSum, PoolingOption

SIZE = 8
MEAN = PoolingOption(Pooling.MEAN, True, SIZE, SIZE)


def sequence(num_prompt: int, option: Option) -> Sequence:
    sampling = SamplingParams(max_tokens=0, temperature=0.0)
    return Sequence(Request("", (5,) * num_prompt, sampling, wanted=Wanted((option,))))


def states(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(1))


def test_a_sequence_has_one_sum_of_all_slices() -> None:
    first, second = sequence(9, MEAN), sequence(3, MEAN)
    hidden, slices, done = states(12), [], 0
    for runs in (
        [ScoredRun(first, 1, 0, 4)],
        [ScoredRun(first, 5, 4, 4)],
        [ScoredRun(first, 9, 8, 1), ScoredRun(second, 1, 9, 3)],
    ):
        count = sum(run.num_tokens for run in runs)
        slices.append(Hidden(runs, hidden[done : done + count], [None] * len(runs)))
        done += count
    found = list(pool(slices, None))
    assert [each.sequence for each in found] == [first, second]
    assert all(each.is_sound for each in found)
    for each, (start, end) in zip(found, ((0, 9), (9, 12)), strict=True):
        assert isinstance(each.part, HiddenSum)
        assert (each.part.first_position, each.part.num_tokens) == (0, end - start)
        total = np.frombuffer(each.part.total, np.float32)
        np.testing.assert_allclose(total, hidden[start:end].sum(0), atol=1e-5)
    assert not list(pool([], None))
