"""Chooses the next tokens from logits.

Randomness is a counter on (seed, position): one uniform number per token, independent of the batch,
turned into a token by inverting the cumulative distribution. The same seed gives the same tokens in
any batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.core import SampledToken, SamplingParams, Sequence
from inference_svc.engine.compute.penalties import (
    ban_ends,
    force,
    has_penalties,
    keep_allowed,
    penalise,
)
from inference_svc.host.copies import to_device
from inference_svc.results.logprobs import LogprobsMode, LogprobsOption, TokenLogprobs

_MASK64 = (1 << 64) - 1

NUM_CANDIDATES = 1024
"""The number of most likely tokens that are tried before the full vocabulary is sorted."""

OPEN = -1
"""In place of the token of a row that NUM_CANDIDATES do not suffice for."""

NOT_FINITE = -2
"""In place of the token of a row that none can be chosen for: its largest logit is infinite or no
number, as all of them become where weights are too large.

Where any logit is no number, so is the largest. Some may be -inf: such a token has the probability
0, as tokens have that adapters of other rows add. Only logits are checked, not keys and values:
infinite keys and values that change no logit stay among requests with the same adapter."""

_SORTED_ROWS = 32
"""Rows whose full vocabulary is sorted at once: that takes many times the memory of their logits.
"""

_BLOCK = 256
"""Probabilities that are summed on their own, so that only one block's sums are walked."""

_CHUNK_ELEMENTS = 1 << 18
"""Size of the probabilities that a CPU works on at once: they stay in its cache."""


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) for (seed, position): splitmix64 (Steele et al., 2014) of both."""
    state = 0
    for word in (seed, position):  # mixed one after the other: sums of them must not collide
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns `uniform` of uint64 arrays: fp64, the same bits."""
    state = np.zeros_like(seeds)
    for words in (seeds, positions):
        state = state + words + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Limits:
    """top_k, top_p and min_p of rows, [N, 1] each."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> _Limits:
        return cls(
            to_device([[p.top_k] for p in params], device),
            to_device([[p.top_p] for p in params], device),
            to_device([[p.min_p] for p in params], device),
        )

    def select(self, rows: Tensor) -> _Limits:
        return _Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


class _Draws:
    """Rows that are drawn: their constants from step to step."""

    def __init__(self, rows: list[tuple[int, Sequence]], device: torch.device) -> None:
        self._device = device
        self.rows = to_device([row for row, _ in rows], device)
        self.num_rows = len(rows)
        self._row_numbers = [row for row, _ in rows]
        self._sequences = [sequence for _, sequence in rows]
        params = [sequence.request.sampling for sequence in self._sequences]
        self.temperatures = to_device([[p.temperature] for p in params], device)
        self.limits = _Limits.of(params, device)
        self._seeds = np.array([p.seed & _MASK64 for p in params], np.uint64)

    def note_sorted(self, rows: set[int]) -> None:
        """Notes for each sequence whether its row is among these, which take more work."""
        for row, sequence in zip(self._row_numbers, self._sequences, strict=True):
            sequence.is_sorted = row in rows

    def numbers(self) -> Tensor:
        """This step's number of each row: fp64 [N, 1]."""
        positions = np.array([len(s.token_ids) for s in self._sequences], np.uint64)
        return to_device(uniforms(self._seeds, positions)[:, None], self._device)


class _Processed(NamedTuple):
    """A row whose log probabilities are of the distribution that it was drawn from, and its place
    among the rows that have any."""

    place: int
    row: int
    sampling: SamplingParams


class _Explained(NamedTuple):
    """A row that has log probabilities, how many of its most likely tokens, how many tokens there
    are for it (other rows may have more, that their adapters add), and whether they are of the
    distribution that it was drawn from."""

    row: int
    num_top: int
    vocab_size: int
    is_processed: bool


class _Rows:
    """The sampling parameters of a batch, as tensors. Steps of the same sequences share them."""

    def __init__(self, sequences: list[Sequence | None], width: int, device: torch.device) -> None:
        def draws(rows: list[tuple[int, Sequence]]) -> _Draws | None:
            return _Draws(rows, device) if rows else None

        self.sequences, self.width = list(sequences), width
        rows = [(row, s, s.request.sampling) for row, s in enumerate(sequences) if s is not None]
        self.limited = [(row, s) for row, s, p in rows if p.min_tokens > 0]
        self.penalised = [(row, s) for row, s, p in rows if has_penalties(p)]
        self.masked = [(row, s) for row, s, _ in rows if s.masked is not None]
        self.thinking = [(row, s) for row, s, _ in rows if s.thinking is not None]
        self.explained = [
            _Explained(
                row,
                min(option.top_k, size),
                size,
                is_processed=option.mode is LogprobsMode.PROCESSED,
            )
            for row, s, _ in rows
            if (option := s.request.wanted.get(LogprobsOption)) is not None
            for size in (known_tokens(s, width),)
        ]
        self.processed = [
            _Processed(place, each.row, _sampling(sequences[each.row]))
            for place, each in enumerate(self.explained)
            if each.is_processed
        ]
        numbers = [each.row for each in self.explained]
        self.logprob_rows = to_device(numbers, device) if numbers else None
        drawn = [(row, s, p.is_cut) for row, s, p in rows if p.temperature > 0]
        self.uncut = draws([(row, s) for row, s, is_cut in drawn if not is_cut])
        self.cut = draws([(row, s) for row, s, is_cut in drawn if is_cut])

    def forced(self) -> list[tuple[int, int]]:
        """Returns the rows whose token is forced in this step, and the token."""
        found = [(row, s.thinking.next_token) for row, s in self.thinking if s.thinking is not None]
        return [(row, token) for row, token in found if token is not None]


def known_tokens(sequence: Sequence, width: int) -> int:
    """Returns how many of `width` tokens there are for a sequence."""
    return min(sequence.request.vocab_size or width, width)


class Sampler:
    """`eos_token_ids` may not be chosen before `min_tokens`. `has_device_memory`: logits lie in a
    device's memory, not in the host's."""

    def __init__(self, eos_token_ids: Collection[int], *, has_device_memory: bool = False) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._has_device_memory = has_device_memory
        self._rows: _Rows | None = None

    def sample(
        self, logits: Tensor, sequences: list[Sequence | None], argmax: Tensor | None = None
    ) -> list[SampledToken]:
        """Returns one token per row of `logits` [N, vocab] fp32, for the N `sequences`: NOT_FINITE
        where none can be chosen; where None is in a sequence's place, any. `argmax` int64 [N] are
        the rows' largest, if known. May change both in place; raw logprobs are of the model's own
        distribution, before any change."""
        width = logits.shape[1]
        if self._rows is None or self._rows.sequences != sequences or self._rows.width != width:
            self._rows = _Rows(sequences, width, logits.device)
        rows, logprobs = self._rows, None
        if argmax is None:
            argmax = self._argmax(logits)
        peaks = logits.gather(1, argmax.unsqueeze(1))
        is_sound = peaks.isfinite()
        if rows.logprob_rows is not None:
            logprobs = logits.index_select(0, rows.logprob_rows).log_softmax(dim=-1)
        if rows.limited:
            ban_ends(logits, rows.limited, self._eos_token_ids)
        if rows.penalised:
            penalise(logits, rows.penalised)
        if rows.masked:
            keep_allowed(logits, rows.masked, self._eos_token_ids)
        forced = rows.forced()
        if forced:
            force(logits, forced)
        if rows.limited or rows.penalised or rows.masked or forced:
            argmax = self._argmax(logits)
            peaks = logits.gather(1, argmax.unsqueeze(1))
            is_sound &= peaks.isfinite()
        if logprobs is not None:
            _process(logits, peaks, logprobs, rows.processed)
        token_ids = self._choose(logits, peaks, argmax, rows)
        token_ids = token_ids.masked_fill(~is_sound.squeeze(1), NOT_FINITE)
        sampled = _read(token_ids, logprobs, rows)
        if rows.cut is None:
            return sampled
        open_rows = {row for row, token in enumerate(sampled) if token.token_id == OPEN}
        rows.cut.note_sorted(open_rows)
        if open_rows:
            token_ids[token_ids == OPEN] = _draw_sorted(logits, peaks, rows.cut, token_ids)
            sampled = _read(token_ids, logprobs, rows)
        return sampled

    def _choose(self, logits: Tensor, peaks: Tensor, token_ids: Tensor, rows: _Rows) -> Tensor:
        """Writes the tokens of rows that are drawn; OPEN where more must be sorted for it."""
        if rows.uncut is not None:
            chunk_rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
            if self._has_device_memory:
                chunk_rows = rows.uncut.num_rows
            token_ids[rows.uncut.rows] = _draw_uncut(logits, peaks, rows.uncut, chunk_rows)
        if rows.cut is not None:
            token_ids[rows.cut.rows] = _draw_cut(logits, peaks, rows.cut)
        return token_ids

    def _argmax(self, logits: Tensor) -> Tensor:
        if self._has_device_memory:
            return logits.argmax(dim=-1)
        # NumPy's is vectorised: an eighth of the time of torch's on two cores.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _sampling(sequence: Sequence | None) -> SamplingParams:
    assert sequence is not None
    return sequence.request.sampling


def _scaled(logits: Tensor, peaks: Tensor, rows: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the logits of rows below their peak, divided by the temperatures [N, 1]: at any
    finite size nothing overflows upwards."""
    return (logits[rows] - peaks[rows]) / temperatures


def _draw_uncut(logits: Tensor, peaks: Tensor, draws: _Draws, chunk_rows: int) -> Tensor:
    """Returns token ids [N] of rows that draw from the full vocabulary, `chunk_rows` at a time."""
    chunks = zip(
        draws.rows.split(chunk_rows),
        draws.temperatures.split(chunk_rows),
        draws.numbers().split(chunk_rows),
        strict=True,
    )
    return torch.cat([invert(_scaled(logits, peaks, r, t).softmax(-1), u) for r, t, u in chunks])


def _draw_cut(logits: Tensor, peaks: Tensor, draws: _Draws) -> Tensor:
    """Returns token ids [N] of rows that top_k, top_p or min_p cut.

    Sorting the full vocabulary is the cost here. The first NUM_CANDIDATES nearly always suffice;
    whether they do depends on the row alone, so its numbers do not depend on the batch. Where they
    do not, OPEN: to ask here whether there is such a row would be to wait for the step.
    """
    scaled = _scaled(logits, peaks, draws.rows, draws.temperatures)
    u, limits = draws.numbers(), draws.limits
    width = min(NUM_CANDIDATES, scaled.shape[1])
    totals = scaled.logsumexp(dim=-1, keepdim=True)
    values, order = scaled.topk(width, dim=-1)
    kept = _truncate((values - totals).exp(), limits)
    tokens = order.gather(1, invert(kept, u).unsqueeze(1)).squeeze(1)
    if width == scaled.shape[1]:
        return tokens
    # Where the cut, if any, lies further down, or top_k's total does.
    return tokens.masked_fill((kept[:, -1] > 0) | (limits.top_k[:, 0] > width), OPEN)


def _draw_sorted(logits: Tensor, peaks: Tensor, draws: _Draws, token_ids: Tensor) -> Tensor:
    """Returns token ids of the rows whose token is OPEN, all of `draws`, from all their tokens."""
    numbers = draws.numbers()
    places = (token_ids[draws.rows] == OPEN).nonzero().squeeze(1)
    found = []
    for some in places.split(_SORTED_ROWS):
        scaled = _scaled(logits, peaks, draws.rows[some], draws.temperatures[some])
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
        probs = (values - scaled.logsumexp(dim=-1, keepdim=True)).exp()
        kept = _truncate(probs, draws.limits.select(some))
        found.append(order.gather(1, invert(kept, numbers[some]).unsqueeze(1)).squeeze(1))
    return torch.cat(found)


def _process(logits: Tensor, peaks: Tensor, logprobs: Tensor, rows: list[_Processed]) -> None:
    """Overwrites the log probabilities of rows by the log probabilities of the distribution that
    they are drawn from: `logits` are banned and penalised. Rows that are greedy are neither scaled
    nor cut."""
    for start in range(0, len(rows), _SORTED_ROWS):
        some = rows[start : start + _SORTED_ROWS]
        places = to_device([each.place for each in some], logits.device)
        temperatures = [[each.sampling.temperature or 1.0] for each in some]
        numbers = to_device([each.row for each in some], logits.device)
        scaled = _scaled(logits, peaks, numbers, to_device(temperatures, logits.device))
        found = scaled.log_softmax(dim=-1)
        params = [each.sampling if each.sampling.temperature else _UNCUT for each in some]
        if any(each.is_cut for each in params):
            values, order = found.sort(dim=-1, descending=True, stable=True)
            kept = _truncate(values.exp(), _Limits.of(params, logits.device))
            kept = (kept / kept.sum(dim=-1, keepdim=True)).log()
            found = found.scatter(1, order, kept)
        logprobs[places] = found


_UNCUT = SamplingParams()


def _truncate(probs: Tensor, limits: _Limits) -> Tensor:
    """`probs` [N, width], the first of each row in descending order, with 0 for tokens that top_k,
    then top_p, then min_p cut. top_p counts within the tokens that top_k leaves."""
    has_top_k = limits.top_k > 0
    ranks = torch.arange(probs.shape[1], device=probs.device)
    probs = probs * (~has_top_k | (ranks < limits.top_k))
    total = torch.where(has_top_k, probs.sum(dim=-1, keepdim=True), 1.0)
    before = probs.cumsum(dim=-1) - probs
    probs = probs * ((before < limits.top_p * total) | (limits.top_p >= 1))
    return probs * (probs >= limits.min_p * probs[:, :1])


def invert(probs: Tensor, u: Tensor) -> Tensor:
    """Returns the first index whose cumulative probability exceeds u [N, 1] of the row's total.

    In fp64, so that a vocabulary of any size keeps its rare tokens; never an index of
    probability 0; some index where probabilities are no numbers. First the block is found, then the
    index in it.
    """
    num_rows, width = probs.shape
    blocks = F.pad(probs, (0, -width % _BLOCK)).view(num_rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    number = u * ends[:, -1:]
    block = _first_above(ends, number)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks[torch.arange(num_rows, device=probs.device), block[:, 0]].double().cumsum(-1)
    index = block * _BLOCK + _first_above(inner, number - before)
    return index.clamp_(max=width - 1).squeeze(1)


def _first_above(cumulative: Tensor, number: Tensor) -> Tensor:
    """Int64 [N, 1]: the first index whose value exceeds `number`; at most, where rounding leaves
    none, the index that reaches the total, and where the total is no number the last."""
    index = torch.searchsorted(cumulative, number, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(index, last).clamp_(max=cumulative.shape[1] - 1)


def _read(token_ids: Tensor, logprobs: Tensor | None, rows: _Rows) -> list[SampledToken]:
    """Returns the tokens, with log probabilities from `logprobs` [L, vocab] of the rows that ask
    for them: of the row's token, and of its most likely ones. Waits for the device once.

    One search for each different count: of equal values it may find others for another.
    """
    if logprobs is None or rows.logprob_rows is None:
        return [SampledToken(token) for token in token_ids.tolist()]
    kinds = sorted({(each.num_top, each.vocab_size) for each in rows.explained})
    tops = [logprobs[:, :size].topk(count) for count, size in kinds]
    # A token that is OPEN is asked for again, and a token that is NOT_FINITE has no log
    # probability.
    own_ids = token_ids[rows.logprob_rows].clamp(min=0)
    own = logprobs.gather(1, own_ids.unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1)
    tokens, own_values, own_ranks, *found = _arrays(
        [token_ids, own, ranks, *(part for top in tops for part in (top.indices, top.values))]
    )
    ids = dict(zip(kinds, found[::2], strict=True))
    values = dict(zip(kinds, found[1::2], strict=True))
    sampled = [SampledToken(int(token)) for token in tokens]
    for place, (row, count, size, _) in enumerate(rows.explained):
        token_id = sampled[row].token_id
        logprobs_of_token = TokenLogprobs.of(
            token_id,
            float(own_values[place, 0]),
            ids[count, size][place],
            values[count, size][place],
            int(own_ranks[place]),
        )
        sampled[row] = SampledToken(token_id, (logprobs_of_token,))
    return sampled


def _arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    """Returns the elements of each, read in one copy: fp64 holds any fp32, and any index."""
    flat = torch.cat([each.flatten().double() for each in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([each.numel() for each in tensors])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, tensors, strict=True)]
