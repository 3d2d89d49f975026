"""The definitions of sampling, in torch, on the device of the logits.

Randomness comes in as one number per row, which is turned into a token by inverting the cumulative
distribution: a row's token does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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

SORTED_ROWS = 32
"""Rows whose full vocabulary is sorted at once: that takes many times the memory of their logits.
"""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_BITS, np.inf, -np.inf).astype(np.float32)
"""The most that eight logits may be, for each byte of a mask: masking by these takes a ninth of the
time of torch on two threads."""

_BLOCK = 256
"""Probabilities that are summed on their own, so that only one block's sums are walked."""


@dataclass(frozen=True, slots=True)
class Limits:
    """top_k, top_p and min_p of rows, int64, fp32 and fp32 [N, 1]; 0, 1 and 0: all tokens."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def select(self, rows: Tensor) -> Limits:
        """Returns the limits of some rows: int64 indices or a bool mask, [n]."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn: their numbers among the logits' rows, int64 [N], temperatures, [N, 1]
    fp32 above 0, and limits."""

    rows: Tensor
    temperatures: Tensor
    limits: Limits


def scaled(logits: Tensor, peaks: Tensor, rows: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the logits of rows below their peak, divided by the temperatures: at any finite size
    nothing overflows upwards.

    Args:
        logits: fp32 [rows, vocabulary].
        peaks: fp32 [rows, 1], the largest logit of each row.
        rows: int64 [N], indices of logits' rows.
        temperatures: fp32 [N, 1], above 0.

    Returns:
        fp32 [N, vocabulary].
    """
    return (logits[rows] - peaks[rows]) / temperatures


def draw_uncut(
    logits: Tensor, peaks: Tensor, draws: Draws, numbers: Tensor, chunk_rows: int
) -> Tensor:
    """Draws from the full vocabulary, `chunk_rows` rows at a time.

    Args:
        logits: [R, vocab] fp32.
        peaks: The rows' largest, [R, 1].
        draws: The rows; limits are not used.
        numbers: fp64 [N, 1] of [0, 1).
        chunk_rows: Rows whose probabilities are in memory at once.

    Returns:
        Token ids, int64 [N].
    """
    chunks = zip(
        draws.rows.split(chunk_rows),
        draws.temperatures.split(chunk_rows),
        numbers.split(chunk_rows),
        strict=True,
    )
    return torch.cat([invert(scaled(logits, peaks, r, t).softmax(-1), u) for r, t, u in chunks])


def draw_cut(
    logits: Tensor, peaks: Tensor, draws: Draws, numbers: Tensor, num_candidates: int
) -> Tensor:
    """Returns token ids, int64 [N], of rows that top_k, top_p or min_p cut. Arguments as of
    `draw_uncut`.

    Sorting the full vocabulary is the cost here. The first `num_candidates` nearly always suffice;
    whether they do depends on the row alone, so its numbers do not depend on the batch. Where they
    do not, OPEN: to ask here whether there is such a row would be to wait for the step.
    """
    below = scaled(logits, peaks, draws.rows, draws.temperatures)
    width = min(num_candidates, below.shape[1])
    totals = below.logsumexp(dim=-1, keepdim=True)
    values, order = below.topk(width, dim=-1)
    kept = truncate((values - totals).exp(), draws.limits)
    tokens = order.gather(1, invert(kept, numbers).unsqueeze(1)).squeeze(1)
    if width == below.shape[1]:
        return tokens
    # Where the cut, if any, lies further down, or top_k's total does.
    return tokens.masked_fill((kept[:, -1] > 0) | (draws.limits.top_k[:, 0] > width), OPEN)


def draw_sorted(
    logits: Tensor, peaks: Tensor, draws: Draws, numbers: Tensor, token_ids: Tensor
) -> Tensor:
    """Returns token ids, int64 [n], of those rows of `draws` whose token in `token_ids`, int64 [R],
    is OPEN, from all their tokens. Other arguments as of `draw_uncut`."""
    places = (token_ids[draws.rows] == OPEN).nonzero().squeeze(1)
    found = []
    for some in places.split(SORTED_ROWS):
        below = scaled(logits, peaks, draws.rows[some], draws.temperatures[some])
        values, order = below.sort(dim=-1, descending=True, stable=True)
        probs = (values - below.logsumexp(dim=-1, keepdim=True)).exp()
        kept = truncate(probs, draws.limits.select(some))
        found.append(order.gather(1, invert(kept, numbers[some]).unsqueeze(1)).squeeze(1))
    return torch.cat(found)


def truncate(probs: Tensor, limits: Limits) -> Tensor:
    """Returns `probs`, fp32 [N, width], each row's largest in descending order, with 0 for tokens
    that top_k, then top_p, then min_p cut. top_p counts within the tokens that top_k leaves."""
    has_top_k = limits.top_k > 0
    ranks = torch.arange(probs.shape[1], device=probs.device)
    probs = probs * (~has_top_k | (ranks < limits.top_k))
    total = torch.where(has_top_k, probs.sum(dim=-1, keepdim=True), 1.0)
    before = probs.cumsum(dim=-1) - probs
    probs = probs * ((before < limits.top_p * total) | (limits.top_p >= 1))
    return probs * (probs >= limits.min_p * probs[:, :1])


def invert(probs: Tensor, u: Tensor) -> Tensor:
    """Returns the first index, int64 [N], whose cumulative probability exceeds u, fp64 [N, 1], of
    the row's total. probs: fp32 [N, width].

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


def keep_allowed(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Sets logits to -inf whose tokens' bits are 0. On the CPU one that is no number stays so.

    Args:
        logits: fp32 [R, vocab], changed in place.
        rows: Rows that have masks, int64 [N].
        masks: A bit for each token, uint8 [N, vocab / 8, rounded up]: the least bit first.
    """
    width = logits.shape[1]
    if logits.device.type == "cpu":
        values = logits.numpy()
        for row, bits in zip(rows.tolist(), masks.numpy(), strict=True):
            own = values[row]
            np.minimum(own, _MOST.take(bits, axis=0).reshape(-1)[:width], out=own)
        return
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((masks.unsqueeze(2) >> places) & 1).flatten(1)[:, :width].bool()
    kept = logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf)
    logits.index_copy_(0, rows, kept)
