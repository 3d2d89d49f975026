"""Penalties on tokens that a sequence contains, bans of stop tokens before `min_tokens`, masks of
grammars, and tokens that are forced.

Tokens are counted as a sequence grows, never anew; all rows of a batch are changed at once.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from inference_svc.core import SamplingParams, Sequence
from inference_svc.host.copies import to_device


def has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class TokenCounts:
    """The distinct tokens of a sequence, in order of appearance, and how often each was generated.

    Lives as long as its sequence, also while that is preempted. Tokens of the prompt count 0; they
    are left out where only the output is penalised.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self.num_seen = sequence.num_prompt
        prompt: dict[int, int] = {}
        if sequence.request.sampling.repetition_penalty != 1.0:
            prompt = dict.fromkeys(sequence.request.prompt_token_ids, 0)
        self._places = {token: place for place, token in enumerate(prompt)}
        self._ids = np.array(list(prompt), np.int64)
        self._counts = np.zeros(len(prompt), np.int64)

    def update(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 ids and counts, [n] each, of the sequence as it is now, valid until the
        next call."""
        tokens = self._sequence.token_ids
        for index in range(self.num_seen, len(tokens)):
            place = self._places.setdefault(tokens[index], len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids), [0]))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts), [0]))
            self._ids[place] = tokens[index]
            self._counts[place] += 1
        self.num_seen = len(tokens)
        size = len(self._places)
        return self._ids[:size], self._counts[:size]


def penalise(logits: torch.Tensor, rows: SequenceOf[tuple[int, Sequence]]) -> None:
    """Changes each (row of `logits`, sequence), logits fp32 [N, vocab]: repetition over prompt and
    output as in CTRL (Keskar et al., 2019); presence and frequency over the output, as in the
    OpenAI API."""
    row_size = logits.stride(0)  # rows have room for tokens that adapters add
    places, factors, changes = [], [], []
    for row, sequence in rows:
        if sequence.token_counts is None:
            sequence.token_counts = TokenCounts(sequence)
        ids, counts = sequence.token_counts.update()
        sampling = sequence.request.sampling
        change = sampling.presence_penalty + sampling.frequency_penalty * counts
        places.append(ids + row * row_size)
        factors.append(np.full(len(ids), sampling.repetition_penalty, np.float32))
        changes.append(np.where(counts > 0, change, 0.0).astype(np.float32))
    at, factor, less = (
        to_device(np.concatenate(parts), logits.device) for parts in (places, factors, changes)
    )
    # One index is much faster than two.
    flat = logits.as_strided((row_size * (len(logits) - 1) + logits.shape[1],), (1,))
    values = flat.index_select(0, at)
    values = torch.where(values > 0, values / factor, values * factor)
    flat.scatter_(0, at, values - less)


def ban_ends(
    logits: torch.Tensor, rows: SequenceOf[tuple[int, Sequence]], eos_token_ids: Collection[int]
) -> None:
    """Sets the logits, fp32 [N, vocab], of stop tokens, and of the model's own unless those are
    ignored, to -inf for each (row, sequence) that has fewer than `min_tokens`."""
    banned, width = [], logits.shape[1]
    for row, sequence in rows:
        sampling = sequence.request.sampling
        if sequence.num_output < sampling.min_tokens:
            ends = () if sampling.ignore_eos else eos_token_ids
            # An adapter's stop token may have no logit once its request has moved to a version that
            # adds fewer tokens.
            found = (*sampling.stop_token_ids, *ends)
            banned += [(row, token) for token in found if token < width]
    if banned:
        at = to_device(banned, logits.device).unbind(1)
        logits[at] = -torch.inf


def allowed_bits(
    sequences: SequenceOf[Sequence], width: int, eos_token_ids: Collection[int]
) -> np.ndarray:
    """Returns a bit for each of `width` tokens that a sequence's grammar allows, uint8 [N, width /
    8, rounded up], the least bit first. Where an answer may end, so may it with any of the
    sequence's stop tokens, and of the model's own."""
    size = -(-width // 8)
    packed = bytearray(len(sequences) * size)  # copies: the process that writes masks goes on
    view = memoryview(packed)
    for start, sequence in zip(range(0, len(packed), size), sequences, strict=True):
        mask = memoryview(sequence.masked.mask)[:size]
        view[start : start + len(mask)] = mask
        if sequence.masked.may_end:
            for token in (*eos_token_ids, *sequence.request.sampling.stop_token_ids):
                if token < width:  # as in `ban_ends`: behind it are the bits of the next row
                    packed[start + (token >> 3)] |= 1 << (token & 7)
    return np.frombuffer(packed, np.uint8).reshape(len(sequences), size)


def force(logits: torch.Tensor, rows: SequenceOf[tuple[int, int]]) -> None:
    """Leaves one token to each (row of `logits`, token), logits fp32 [N, vocab]."""
    numbers, tokens = to_device(list(zip(*rows, strict=True)), logits.device)
    logits.index_fill_(0, numbers, -torch.inf)
    logits[numbers, tokens] = 0.0
