"""The sampler chooses on the device what it chooses on the CPU, token for token."""

from __future__ import annotations

import pytest
import torch

from inference_svc.core import Request, SampledToken, SamplingParams, Sequence
from inference_svc.engine.compute.sampler import Sampler
from tests.support.inference.results import logprobs_of, wanted_of

NUM_ROWS, EOS = 32, 3
MAX_PLACES = 2
"""Between two tokens, by their logits, that rounding may exchange."""
CHOICES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "nearly all of the vocabulary": {"temperature": 3.0, "top_p": 0.999},
    "penalised": {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "not to end": {"temperature": 0.0, "min_tokens": 9},
}


def sequences_of(choices: list[dict[str, float]]) -> list[Sequence]:
    rows = []
    for row in range(NUM_ROWS):
        params = SamplingParams(seed=row, **choices[row % len(choices)])
        wanted = wanted_of(logprobs=row % 4)
        rows.append(Sequence(Request(f"r{row}", (1, 2, row), params, wanted=wanted)))
        rows[-1].token_ids += [5, 6, row]
    return rows


def ids_of(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("vocab_size", [5_000, pytest.param(128_256, marks=pytest.mark.real)])
@pytest.mark.parametrize("choice", [*CHOICES, "all of them"])
def test_equals_the_cpu(device, vocab_size, choice):
    choices = [CHOICES[choice]] if choice in CHOICES else list(CHOICES.values())
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(7)) * 4
    # The largest is clearly the largest: sums may be rounded in other ways.
    logits[:, 11] += 3
    wanted = Sampler([EOS]).sample(logits.clone(), sequences_of(choices))
    sampler = Sampler([EOS], has_device_memory=True)
    got = sampler.sample(logits.to(device), sequences_of(choices))
    differ = [one != other for one, other in zip(ids_of(got), ids_of(wanted), strict=True)]
    # Where a number falls on the border of two tokens, sums in another order decide. The more
    # tokens, the more borders.
    assert sum(differ) <= (NUM_ROWS // 8 if vocab_size > 100_000 else 0)
    places = logits.argsort(dim=-1, descending=True).argsort(dim=-1)
    for row, (one, other) in enumerate(zip(ids_of(got), ids_of(wanted), strict=True)):
        assert abs(int(places[row, one] - places[row, other])) <= MAX_PLACES, f"row {row}"
    for ours, theirs, is_other in zip(got, wanted, differ, strict=True):
        if is_other:
            continue
        found, expected = logprobs_of(ours), logprobs_of(theirs)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [i for i, _ in found.top] == [i for i, _ in expected.top]
