"""Chooses the next tokens from logits.

Randomness is a counter on (seed, position): one uniform number per token, independent of the
batch, turned into a token by inverting the cumulative distribution. The same seed gives the same
tokens whatever else runs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from inference_svc.core import SampledToken, SamplingParams, Sequence, TokenLogprobs

_MASK64 = (1 << 64) - 1

NUM_CANDIDATES = 1024
"""The most likely tokens that are looked at before a whole vocabulary is put in order."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for (seed, position): splitmix64 (Steele et al., 2014) of both."""
    state = 0
    for word in (seed, position):  # mixed one after the other: sums of them must not collide
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class Sampler:
    """`eos_token_ids` may not be chosen before `min_tokens`."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """One token per row of `logits` [N, vocab] fp32, for the N `sequences`. Logits may be
        changed in place; logprobs are of the model's own distribution, before any change."""
        logprobs = _raw_logprobs(logits, sequences)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        token_ids = logits.argmax(dim=-1)
        drawn = [i for i, s in enumerate(sequences) if s.request.sampling.temperature > 0]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            token_ids[rows] = _draw(logits[rows], [sequences[i] for i in drawn])
        chosen = token_ids.tolist()
        return [
            SampledToken(token, _token_logprobs(logprobs.get(row), token, sequence))
            for row, (token, sequence) in enumerate(zip(chosen, sequences, strict=True))
        ]

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        if sequence.num_output < sampling.min_tokens:
            banned = set(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                banned.update(self._eos_token_ids)
            if banned:
                logits[torch.tensor(sorted(banned), device=logits.device)] = -torch.inf
        if _has_penalties(sampling):
            _penalise(logits, sequence)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _penalise(logits: torch.Tensor, sequence: Sequence) -> None:
    """Repetition over prompt and output as in CTRL (Keskar et al., 2019); presence and frequency
    over the output, as in the OpenAI API."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(sequence.token_ids)).to(logits.device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    output = sequence.token_ids[sequence.num_prompt :]
    if output:
        ids, counts = np.unique(output, return_counts=True)
        change = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(change).to(logits)


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Token ids [N] drawn from `logits` [N, vocab] under each sequence's parameters."""
    params = [s.request.sampling for s in sequences]
    temperatures = torch.tensor([[p.temperature] for p in params], device=logits.device)
    numbers = [uniform(s.request.sampling.seed, len(s.token_ids)) for s in sequences]
    u = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1)
    scaled = logits / temperatures
    cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p > 0]
    whole = sorted(set(range(len(params))) - set(cut))
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if whole:
        rows = torch.tensor(whole, device=logits.device)
        tokens[rows] = _invert(scaled[rows].softmax(dim=-1), u[rows])
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        tokens[rows] = _draw_cut(scaled[rows], [params[i] for i in cut], u[rows])
    return tokens


def _draw_cut(scaled: torch.Tensor, params: list[SamplingParams], u: torch.Tensor) -> torch.Tensor:
    """Token ids [N] of rows that top_k, top_p or min_p cut.

    Ordering a whole vocabulary is what costs here. The first NUM_CANDIDATES tell nearly always;
    whether they do depends on the row alone, so its numbers do not depend on the batch.
    """
    width = min(NUM_CANDIDATES, scaled.shape[1])
    totals = scaled.logsumexp(dim=-1, keepdim=True)
    values, order = scaled.topk(width, dim=-1)
    probs = (values - totals).exp()
    kept = _truncate(probs, params)
    tokens = order.gather(1, _invert(kept, u).unsqueeze(1)).squeeze(1)
    # Where the cut, if any, lies further down, or top_k's total does.
    more = torch.tensor([p.top_k > width for p in params], device=scaled.device)
    open_rows = ((kept[:, -1] > 0) | more).nonzero().squeeze(1)
    if width < scaled.shape[1] and open_rows.numel():
        values, order = scaled[open_rows].sort(dim=-1, descending=True, stable=True)
        probs = (values - totals[open_rows]).exp()
        kept = _truncate(probs, [params[i] for i in open_rows.tolist()])
        found = order.gather(1, _invert(kept, u[open_rows]).unsqueeze(1)).squeeze(1)
        tokens[open_rows] = found
    return tokens


def _truncate(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """`probs` [N, width], the first of each row in descending order, with 0 for what top_k, then
    top_p, then min_p cut. top_p counts from what top_k leaves."""
    device, width = probs.device, probs.shape[1]
    top_k = torch.tensor([[p.top_k or width] for p in params], device=device)
    top_p = torch.tensor([[p.top_p] for p in params], device=device)
    min_p = torch.tensor([[p.min_p] for p in params], device=device)
    has_top_k = torch.tensor([[p.top_k > 0] for p in params], device=device)
    probs = probs * (torch.arange(width, device=device) < top_k)
    total = torch.where(has_top_k, probs.sum(dim=-1, keepdim=True), 1.0)
    before = probs.cumsum(dim=-1) - probs
    probs = probs * ((before < top_p * total) | (top_p >= 1))
    return probs * (probs >= min_p * probs[:, :1])


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds u [N, 1] of the row's total.

    In fp64, so that a vocabulary of any size keeps its rare tokens; never an index of
    probability 0.
    """
    cumulative = probs.double().cumsum(dim=-1)
    index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    last = (probs > 0).long().mul(torch.arange(probs.shape[1], device=probs.device)).amax(dim=-1)
    return torch.minimum(index.squeeze(1), last)


def _raw_logprobs(logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, torch.Tensor]:
    return {
        row: logits[row].log_softmax(dim=-1)
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.logprobs is not None
    }


def _token_logprobs(
    logprobs: torch.Tensor | None, token_id: int, sequence: Sequence
) -> TokenLogprobs | None:
    count = sequence.request.sampling.logprobs
    if logprobs is None or count is None:
        return None
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
