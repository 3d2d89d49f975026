"""The results of a step for prompts that are pooled: one for each, of whatever slices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inference_svc.backends.base import Hidden
from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.core import BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.compute.scorer import choose, pool
from inference_svc.model.checkpoint.classifier import ClassifierHead
from inference_svc.results.base import Option, Wanted
from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import HiddenSum, PoolingOption, TokenStates

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


def test_a_head_has_one_product_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its rows are mixed with those of other heads, and with vectors."""
    heads = [ClassifierHead(torch.randn(count, SIZE)) for count in (3, 2, 5)]
    own = [None, heads[1], None, heads[2], heads[1], None]
    rows = [sequence(2, ClassLogitsOption()) for _ in own]
    rows[2] = sequence(2, PoolingOption(Pooling.LAST, True, SIZE, SIZE))
    hidden, sizes = states(len(rows)), []
    apply = ClassifierHead.__call__

    def counted(head: ClassifierHead, given: torch.Tensor) -> torch.Tensor | None:
        sizes.append(len(given))
        return apply(head, given)

    monkeypatch.setattr(ClassifierHead, "__call__", counted)
    runs = [ScoredRun(each, 2, index, 1) for index, each in enumerate(rows)]
    slices = [Hidden(runs[i : i + 3], hidden[i : i + 3], own[i : i + 3]) for i in (0, 3)]
    found = list(pool(slices, heads[0]))
    assert [each.sequence for each in found] == rows
    assert sizes == [2, 2, 1]
    assert isinstance(found.pop(2).part, HiddenSum)
    for each, index in zip(found, (0, 1, 3, 4, 5), strict=True):
        assert isinstance(each.part, ClassLogits)
        head = own[index]
        weight = (heads[0] if head is None else head).out
        assert weight is not None
        np.testing.assert_allclose(each.part.logits, weight @ hidden[index], atol=1e-5)
        assert (each.part.end, each.part.is_own) == (2, head is not None)


def test_tokens_are_kept_apart_beside_sums_and_other_heads() -> None:
    """However slices cut their runs; a buffer that is written again changes nothing."""
    each_token = PoolingOption(Pooling.NONE, False, SIZE, SIZE)
    vectors, tags = sequence(5, each_token), sequence(3, ClassLogitsOption(per_token=True))
    mean, label = sequence(2, MEAN), sequence(1, ClassLogitsOption())
    base, hidden = ClassifierHead(torch.randn(4, SIZE), torch.randn(4)), states(11)
    runs = [
        [ScoredRun(vectors, 1, 0, 3)],
        [ScoredRun(vectors, 4, 3, 2), ScoredRun(tags, 1, 5, 1)],
        [ScoredRun(tags, 2, 6, 2), ScoredRun(mean, 1, 8, 2), ScoredRun(label, 1, 10, 1)],
    ]
    buffer = torch.empty(5, SIZE)

    def slices() -> Iterator[Hidden]:
        done = 0
        for part in runs:
            count = sum(run.num_tokens for run in part)
            buffer[:count] = hidden[done : done + count]
            yield Hidden(part, buffer[:count], [None] * len(part))
            done += count

    found: dict[Sequence, list[Any]] = {}
    for each in pool(slices(), base):
        assert each.is_sound
        found.setdefault(each.sequence, []).append(each.part)
    parts = found[vectors]
    assert [(p.first_position, p.num_tokens) for p in parts] == [(0, 3), (3, 2)]
    assert all(isinstance(part, TokenStates) for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.rows for part in parts]), hidden[:5])
    wanted = base(hidden)
    assert wanted is not None
    labels = np.concatenate([part.rows for part in found[tags]])
    np.testing.assert_allclose(labels, wanted[5:8], atol=1e-5)
    assert [(p.end, p.num_tokens) for p in found[tags]] == [(1, 1), (3, 2)]
    assert isinstance(found[mean][0], HiddenSum)
    np.testing.assert_allclose(found[label][0].logits, wanted[10], atol=1e-5)


@pytest.mark.parametrize(("scale", "is_sound"), [(1.0, True), (3e38, False), (math.nan, False)])
def test_outputs_that_are_not_finite_are_not_sound(scale: float, is_sound: bool) -> None:
    """Of one head: the hidden states are finite, and rows of other heads stay sound."""
    base, own = ClassifierHead(torch.ones(2, SIZE)), ClassifierHead(torch.ones(2, SIZE) * scale)
    rows = [sequence(1, ClassLogitsOption()) for _ in range(2)]
    runs = [ScoredRun(each, 1, index, 1) for index, each in enumerate(rows)]
    found = list(pool([Hidden(runs, torch.ones(2, SIZE), [None, own])], base))
    assert [each.is_sound for each in found] == [True, is_sound]


@pytest.mark.parametrize(
    ("values", "is_sound"),
    [
        ((1.0, 2.0), True),
        ((-math.inf, 2.0), True),
        ((-math.inf, -math.inf), False),
        ((math.inf, 2.0), False),
        ((math.nan, 2.0), False),
    ],
)
def test_chosen_logits_without_shares_are_not_sound(
    values: tuple[float, float], is_sound: bool
) -> None:
    row = sequence(1, ChosenLogitsOption(("no", "yes"), (0, 1)))
    logits = torch.tensor([[*values, 3.0]])
    [found] = choose([BatchRow(row, 0, 1, samples=False)], logits)
    assert found.is_sound == is_sound
    assert isinstance(found.part, ChosenLogits)
    assert not is_sound or 0 < found.part.share_of_last() <= 1
