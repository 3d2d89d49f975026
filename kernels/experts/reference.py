"""The definition of mixtures of experts: plain torch, fp32.

Every token chooses some experts, and each of these makes a row of it: a pair of a token and an
expert. Rows lie in the order of experts, and of one expert in the order of tokens, so that each
expert's weights are read once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MAX_EXPERTS = 1024
"""Most experts of one layer."""
LEAST_SUM = 1e-20
"""Added to the sum by which weights are divided, as in DeepSeek-V3."""


EXPERT_ROWS = 32
"""An expert takes a multiple of this many rows where experts are stacked below each other. The
CPU's products read so many rows together."""


def padded_rows(out_features: int) -> int:
    """Returns the rows that each expert takes in weights that are stacked below each other."""
    return -(-out_features // EXPERT_ROWS) * EXPERT_ROWS


class Scoring(enum.Enum):
    """How a router's logits become scores, over all experts or over the chosen ones."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token chooses and weighs its `num_chosen` experts.

    Experts are in `num_groups` of neighbours. Only the `num_chosen_groups` whose two best experts
    have the largest sum of scores are considered. Weights are the scores times `scale`; with
    `normalised`, the scores are first divided by their sum.
    """

    num_chosen: int
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0


class Routing(NamedTuple):
    """Each token's experts, int32 [T, num_chosen], the best first, and their weights, float32
    [T, num_chosen]."""

    experts: Tensor
    weights: Tensor


class Pairs(NamedTuple):
    """Pairs of tokens and experts in the order of experts. `tokens` is each pair's token, int64
    [P]. `starts` is the first pair of each expert, and the number of pairs, int32 [experts + 1].
    `rows` has the places of each token's pairs, int32 [T, num_chosen].

    Of some experts' own pairs `first_expert` is the number of the first of these; None: they are of
    all. On a device they have places for all pairs, because the host does not know how many there
    are: behind `starts[-1]` nothing is computed."""

    tokens: Tensor
    starts: Tensor
    rows: Tensor
    first_expert: int | None = None


def route(
    logits: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Routing:
    """Chooses experts by logits; among equal ones, the first.

    Args:
        logits: float32 [T, experts].
        choice: How experts are chosen and weighed.
        bias: Added to scores for the choice only, float32 [experts].
        expert_scales: Factors of the weights, float32 [experts].
        out: Gets the experts, int32 [T, num_chosen]. None: a new tensor.

    Returns:
        The experts, int32 [T, num_chosen], and their weights, float32 [T, num_chosen].
    """
    scores = {
        Scoring.SOFTMAX: lambda: logits.softmax(dim=-1),
        Scoring.SIGMOID: logits.sigmoid,
        Scoring.SOFTMAX_OF_CHOSEN: lambda: logits,
    }[choice.scoring]()
    ranked = logits if bias is None else scores + bias  # scores ascend with logits
    if choice.num_chosen_groups < choice.num_groups:
        ranked = _of_best_groups(ranked if bias is not None else scores, choice)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, : choice.num_chosen]
    weights = scores.gather(1, experts)
    if choice.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(dim=-1)
    if choice.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    weights = weights * choice.scale
    if expert_scales is not None:
        weights = weights * expert_scales[experts]
    return Routing(experts.int() if out is None else out.copy_(experts), weights)


def _of_best_groups(ranked: Tensor, choice: Choice) -> Tensor:
    """Returns scores [T, experts], with -inf for experts of other groups."""
    grouped = ranked.unflatten(1, (choice.num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(1, order[:, : choice.num_chosen_groups], value=True)
    return grouped.masked_fill(~chosen[:, :, None], float("-inf")).flatten(1)


def sort_pairs(experts: Tensor, num_experts: int, order: Tensor | None = None) -> Pairs:
    """Sorts pairs of tokens and experts by expert.

    Args:
        experts: int32 [T, num_chosen].
        num_experts: Number of experts.
        order: Order of tokens within an expert, integers [T], with each token once. None: as they
            come.
    """
    order = None if order is None else order.long()
    ordered = experts if order is None else experts[order]
    flat = ordered.flatten().long()
    places = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.empty_like(flat).scatter_(0, places, torch.arange(len(flat), device=flat.device))
    tokens, rows = places // experts.shape[1], rows.view_as(experts).int()
    if order is not None:
        tokens, rows = order[tokens], torch.empty_like(rows).index_copy_(0, order, rows)
    return Pairs(tokens, starts, rows)


def own_pairs(pairs: Pairs, experts: tuple[int, int]) -> Pairs:
    """Returns the pairs of experts [first, end) alone, in the same order, numbered from 0. Tokens'
    other pairs have the place behind all.

    Args:
        pairs: The pairs of all experts.
        experts: The first expert, and the one behind the last.
    """
    first, end = experts
    starts = pairs.starts[first : end + 1]
    begin, last = starts[[0, -1]].tolist()
    rows = pairs.rows - begin
    is_own = (rows >= 0) & (rows < last - begin)
    rows = rows.where(is_own, last - begin)
    return Pairs(pairs.tokens[begin:last], starts - begin, rows, first)


def experts_linear(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """out[p] = x[p] @ weight[e]^T + bias[e] with each pair's expert e, summed in fp32 and rounded
    once.

    Args:
        x: [P, in]; with `rows`, any number of rows.
        weight: [experts, out, in].
        pairs: The pairs, in the order of experts.
        bias: [experts, out]. None: none.
        rows: int64 [P]: x[rows[p]] in place of x[p].

    Returns:
        [P, out] of x's dtype.
    """
    out = x.new_empty(len(x if rows is None else rows), weight.shape[1])
    starts = pairs.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        own = x[start:end] if rows is None else x[rows[start:end]]
        sums = own.float() @ weight[expert].float().t()
        out[start:end] = sums if bias is None else sums + bias[expert].float()
    return out


def combine(
    x: Tensor,
    pairs: Pairs,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
) -> Tensor:
    """Sums the outputs of a token's experts, the best first, in fp32, rounded once:

    out[t] = sum_j weights[t, j] * x[rows[t, j]] + sigmoid(shared_logits[t]) * shared[t]

    Args:
        x: [P, size].
        pairs: The pairs, which have `rows`. Where some are of other experts, these add nothing.
        weights: float32 [T, num_chosen].
        shared: [T, size]. None: there is none.
        shared_logits: float32 [T, 1]. None: the factor of `shared` is 1.

    Returns:
        [T, size] of x's dtype.
    """
    if pairs.first_expert is not None:
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))  # the pairs of other experts are this row
    total = torch.zeros(len(weights), x.shape[1], device=x.device)
    for j in range(weights.shape[1]):
        total += weights[:, j, None] * x[pairs.rows[:, j].long()].float()
    if shared is not None:
        gate = 1.0 if shared_logits is None else shared_logits.sigmoid()
        total += gate * shared.float()
    return total.to(x.dtype)
