"""Chooses the next tokens from logits.

Randomness is a counter on (seed, position): one uniform number per token, independent of the batch,
turned into a token by inverting the cumulative distribution. The same seed gives the same tokens in
any batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference_svc.core import SampledToken, SamplingParams, Sequence
from inference_svc.engine.compute.penalties import (
    allowed_bits,
    ban_ends,
    force,
    has_penalties,
    penalise,
)
from inference_svc.host.copies import to_device
from inference_svc.results.logprobs import LogprobsMode, LogprobsOption, TokenLogprobs
from kernels.native.library import Library
from kernels.sampling import NativeChoice, RowParams, reference
from kernels.sampling.reference import (
    NOT_FINITE,
    NUM_CANDIDATES,
    OPEN,
    SORTED_ROWS,
    Draws,
    Limits,
    scaled,
    truncate,
)

_MASK64 = (1 << 64) - 1

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
    """Returns `uniform` of uint64 arrays [n]: fp64 [n], the same bits."""
    state = np.zeros_like(seeds)
    for words in (seeds, positions):
        state = state + words + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) * 2.0**-53


def _limits(params: list[SamplingParams], device: torch.device) -> Limits:
    return Limits(
        to_device([[p.top_k] for p in params], device),
        to_device([[p.top_p] for p in params], device),
        to_device([[p.min_p] for p in params], device),
    )


class _Numbers:
    """The numbers that rows are drawn with, from step to step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        seeds = [sequence.request.sampling.seed & _MASK64 for sequence in sequences]
        self._seeds = np.array(seeds, np.uint64)

    def next(self) -> np.ndarray:
        """Returns this step's number of each row: fp64 [N]."""
        positions = np.array([len(s.token_ids) for s in self._sequences], np.uint64)
        return uniforms(self._seeds, positions)


class _Drawn:
    """Rows that are drawn: their constants from step to step."""

    def __init__(self, rows: list[tuple[int, Sequence]], device: torch.device) -> None:
        self._device = device
        self._sequences = [sequence for _, sequence in rows]
        self._row_numbers = [row for row, _ in rows]
        self._numbers = _Numbers(self._sequences)
        params = [sequence.request.sampling for sequence in self._sequences]
        self.num_rows = len(rows)
        self.draws = Draws(
            to_device(self._row_numbers, device),
            to_device([[p.temperature] for p in params], device),
            _limits(params, device),
        )

    def note_sorted(self, rows: set[int]) -> None:
        """Notes for each sequence whether its row is among these, which take more work."""
        for row, sequence in zip(self._row_numbers, self._sequences, strict=True):
            sequence.is_sorted = row in rows

    def numbers(self) -> Tensor:
        """Returns this step's number of each row: fp64 [N, 1]."""
        return to_device(self._numbers.next()[:, None], self._device)


class _Masks(NamedTuple):
    """Rows of the logits, and bits of the tokens that each may choose, as of `allowed_bits`."""

    rows: list[int]
    bits: np.ndarray

    def of(self, rows: set[int]) -> _Masks:
        """Returns the masks of some of the rows."""
        places = [place for place, row in enumerate(self.rows) if row in rows]
        return _Masks([self.rows[place] for place in places], self.bits[places])


_NO_MASKS = _Masks([], np.zeros((0, 0), np.uint8))


class _Native:
    """All rows of a batch, whose tokens the library chooses."""

    def __init__(self, library: Library, sequences: list[Sequence | None], width: int) -> None:
        drawn = [(row, s) for row, s in enumerate(sequences) if s is not None]
        drawn = [(row, s) for row, s in drawn if s.request.sampling.temperature > 0]
        self._rows = np.array([row for row, _ in drawn], np.int64)
        self._numbers = _Numbers([sequence for _, sequence in drawn])
        self._cut = [(row, s) for row, s in drawn if s.request.sampling.is_cut]
        params = [RowParams()] * len(sequences)
        for row, sequence in drawn:
            found = sequence.request.sampling
            params[row] = RowParams(found.temperature, found.top_k, found.top_p, found.min_p)
        self._choice = NativeChoice(library, params, width)

    def choose(self, logits: Tensor, masks: _Masks) -> Tensor:
        """Returns the rows' tokens or NOT_FINITE, int64 [N], valid until the next call."""
        self._choice.numbers[self._rows] = self._numbers.next()
        tokens, num_sorted = self._choice.choose(logits, masks.rows, masks.bits)
        for row, sequence in self._cut:
            sequence.is_sorted = bool(num_sorted[row] > NUM_CANDIDATES)
        return torch.from_numpy(tokens)


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

    def __init__(
        self,
        sequences: list[Sequence | None],
        width: int,
        device: torch.device,
        library: Library | None,
    ) -> None:
        def drawn_by_torch(rows: list[tuple[int, Sequence]]) -> _Drawn | None:
            return _Drawn(rows, device) if rows and library is None else None

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
        self.uncut = drawn_by_torch([(row, s) for row, s, is_cut in drawn if not is_cut])
        self.cut = drawn_by_torch([(row, s) for row, s, is_cut in drawn if is_cut])
        self.native = None if library is None else _Native(library, sequences, width)

    def forced(self) -> list[tuple[int, int]]:
        """Returns the rows whose token is forced in this step, and the token."""
        found = [(row, s.thinking.next_token) for row, s in self.thinking if s.thinking is not None]
        return [(row, token) for row, token in found if token is not None]


def known_tokens(sequence: Sequence, width: int) -> int:
    """Returns how many of `width` tokens there are for a sequence."""
    return min(sequence.request.vocab_size or width, width)


class Sampler:
    """`eos_token_ids` may not be chosen before `min_tokens`. `has_device_memory`: logits lie in a
    device's memory, not in the host's. `library` chooses tokens of the host's; None: torch does."""

    def __init__(
        self,
        eos_token_ids: Collection[int],
        *,
        has_device_memory: bool = False,
        library: Library | None = None,
    ) -> None:
        assert library is None or not has_device_memory
        self._eos_token_ids = tuple(eos_token_ids)
        self._has_device_memory = has_device_memory
        self._library = library
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
            self._rows = _Rows(sequences, width, logits.device, self._library)
        rows, logprobs = self._rows, None
        if rows.logprob_rows is not None:
            logprobs = logits.index_select(0, rows.logprob_rows).log_softmax(dim=-1)
        if rows.native is not None:
            return self._sample_natively(logits, logprobs, rows, rows.native)
        if argmax is None:
            argmax = self._argmax(logits)
        peaks = logits.gather(1, argmax.unsqueeze(1))
        is_sound = peaks.isfinite()
        forced = rows.forced()
        if self._change(logits, rows, forced, self._masks(rows, forced)):
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
            cut, numbers = rows.cut.draws, rows.cut.numbers()
            found = reference.draw_sorted(logits, peaks, cut, numbers, token_ids)
            token_ids[token_ids == OPEN] = found
            sampled = _read(token_ids, logprobs, rows)
        return sampled

    def _sample_natively(
        self, logits: Tensor, logprobs: Tensor | None, rows: _Rows, chosen_by: _Native
    ) -> list[SampledToken]:
        forced = rows.forced()
        masks = self._masks(rows, forced)
        early = masks.of({each.row for each in rows.processed}) if rows.processed else _NO_MASKS
        # The library looks at all logits of a row, but these may be overwritten before it does.
        changed = {row for row, _ in (*rows.limited, *forced)}.union(early.rows)
        values = logits.numpy()
        unsound = [row for row in changed if not np.isfinite(values[row].max())]
        self._change(logits, rows, forced, early)
        if logprobs is not None and rows.processed:
            _process(logits, logits.amax(dim=-1, keepdim=True), logprobs, rows.processed)
        token_ids = chosen_by.choose(logits, masks)
        if unsound:
            token_ids[unsound] = NOT_FINITE
        return _read(token_ids, logprobs, rows)

    def _masks(self, rows: _Rows, forced: list[tuple[int, int]]) -> _Masks:
        """Returns the masks of rows whose token is not forced."""
        if not rows.masked:
            return _NO_MASKS
        without = {row for row, _ in forced}
        found = [each for each in rows.masked if each[0] not in without]
        bits = allowed_bits([s for _, s in found], rows.width, self._eos_token_ids)
        return _Masks([row for row, _ in found], bits)

    def _argmax(self, logits: Tensor) -> Tensor:
        """Returns the places of the rows' largest logits, int64 [N]; of the first NaN, if any."""
        if self._has_device_memory:
            return logits.argmax(dim=-1)
        # NumPy's takes a third of the time of torch's on two threads.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))

    def _change(
        self, logits: Tensor, rows: _Rows, forced: list[tuple[int, int]], masks: _Masks
    ) -> bool:
        """Applies bans, penalties, forced tokens and these masks; returns whether there are any."""
        if rows.limited:
            ban_ends(logits, rows.limited, self._eos_token_ids)
        if rows.penalised:
            penalise(logits, rows.penalised)
        if masks.rows:
            numbers = np.array(masks.rows, np.int64)
            found = (to_device(each, logits.device) for each in (numbers, masks.bits))
            reference.keep_allowed(logits, *found)
        if forced:
            force(logits, forced)
        return bool(rows.limited or rows.penalised or masks.rows or forced)

    def _choose(self, logits: Tensor, peaks: Tensor, token_ids: Tensor, rows: _Rows) -> Tensor:
        """Writes the tokens of rows that are drawn; OPEN where more must be sorted for it."""
        if rows.uncut is not None:
            chunk_rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
            if self._has_device_memory:
                chunk_rows = rows.uncut.num_rows
            draws, numbers = rows.uncut.draws, rows.uncut.numbers()
            found = reference.draw_uncut(logits, peaks, draws, numbers, chunk_rows)
            token_ids[draws.rows] = found
        if rows.cut is not None:
            draws, numbers = rows.cut.draws, rows.cut.numbers()
            found = reference.draw_cut(logits, peaks, draws, numbers, NUM_CANDIDATES)
            token_ids[draws.rows] = found
        return token_ids


def _sampling(sequence: Sequence | None) -> SamplingParams:
    assert sequence is not None
    return sequence.request.sampling


def _process(logits: Tensor, peaks: Tensor, logprobs: Tensor, rows: list[_Processed]) -> None:
    """Overwrites the log probabilities of rows by the log probabilities of the distribution that
    they are drawn from: `logits` are banned and penalised. Rows that are greedy are neither scaled
    nor cut."""
    for start in range(0, len(rows), SORTED_ROWS):
        some = rows[start : start + SORTED_ROWS]
        places = to_device([each.place for each in some], logits.device)
        temperatures = [[each.sampling.temperature or 1.0] for each in some]
        numbers = to_device([each.row for each in some], logits.device)
        below = scaled(logits, peaks, numbers, to_device(temperatures, logits.device))
        found = below.log_softmax(dim=-1)
        params = [each.sampling if each.sampling.temperature else _UNCUT for each in some]
        if any(each.is_cut for each in params):
            values, order = found.sort(dim=-1, descending=True, stable=True)
            kept = truncate(values.exp(), _limits(params, logits.device))
            kept = (kept / kept.sum(dim=-1, keepdim=True)).log()
            found = found.scatter(1, order, kept)
        logprobs[places] = found


_UNCUT = SamplingParams()


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
