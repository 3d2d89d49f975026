"""An engine's logits beside an oracle's: how to record them, prompts of many lengths, and measures
of how far two differ."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

import torch

from inference_svc.core import SampledToken, Sequence
from inference_svc.engine.compute.sampler import Sampler


class RecordingSampler(Sampler):
    """Keeps each sequence's logits, in order of position."""

    def __init__(self, eos_token_ids: Any) -> None:
        super().__init__(eos_token_ids)
        self.logits: dict[str, list[torch.Tensor]] = {}

    def sample(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence | None],
        argmax: torch.Tensor | None = None,
    ) -> list[SampledToken]:
        for row, sequence in enumerate(sequences):
            if sequence is None:
                continue
            self.logits.setdefault(sequence.request.request_id, []).append(logits[row].clone())
        return super().sample(logits, sequences, argmax)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [(7, 33, 1, 18, 300, 5, 26, 12)[i % 8] for i in range(count)]
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).square().mean() / expected.square().mean()).sqrt().item()


def decile_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns that of the best tenth of tokens: others may have experts of nearly equal scores,
    which rounding chooses among, and attend to tokens that have."""
    return quantiles(map(relative_rms, got, expected), n=10)[0]


def logprobs_of(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Returns those of every token at each position but the first, [len - 1, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(-1)
