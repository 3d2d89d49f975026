"""Attention without a causal mask, of the tokens of one step to each other: the definition, in
torch. Nothing is stored: each row of the step is a whole prompt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.plan import AttentionPlan

Run = tuple[int, int, int]
"""Neighbouring rows of one length: their first token, their number, and their length."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, reach: int | None = None
) -> Tensor:
    """Returns softmax(scale * q k^T) v of each row of the step by itself.

    Neighbouring rows of one length are computed at once. Softmax and sums are in fp32, or as wide
    as torch's kernel has them.

    Args:
        q: [T, heads, head_dim], of a float dtype; rows may be apart.
        k: As q.
        v: As q.
        plan: The step's; every row begins at position 0.
        scale: Factor of the scores.
        reach: Positions that a query sees to either side. None: all.

    Returns:
        [T, heads, head_dim] of q's dtype.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for first, count, length in _runs(plan):
        rows = slice(first, first + count * length)
        own_q, own_k, own_v = (
            x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )
        mask = (
            None if reach is None or reach >= length - 1 else _mask(plan, length, reach, q.device)
        )
        made = F.scaled_dot_product_attention(own_q, own_k, own_v, mask, scale=scale)
        out[rows].unflatten(0, (count, length)).copy_(made.transpose(1, 2))
    return out


def attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns softmax(scale * q k^T) v of queries of one row, which may be some of its tokens.

    Args:
        q: [Q, heads, head_dim], of a float dtype; rows may be apart.
        k: [T, heads, head_dim], as q.
        v: As k.
        scale: Factor of the scores.

    Returns:
        [Q, heads, head_dim] of q's dtype.
    """
    own_q, own_k, own_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    made = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)
    return made[0].transpose(0, 1)


def _runs(plan: AttentionPlan) -> tuple[Run, ...]:
    found: tuple[Run, ...] | None = plan.derived.get(_runs)
    if found is None:
        found = plan.derived[_runs] = tuple(_find_runs(plan))
    return found


def _find_runs(plan: AttentionPlan) -> Iterator[Run]:
    starts = plan.host_query_starts.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    row = 0
    while row < len(lengths):
        end = row
        while end < len(lengths) and lengths[end] == lengths[row]:
            end += 1
        yield starts[row], end - row, lengths[row]
        row = end


def _mask(plan: AttentionPlan, length: int, reach: int, device: torch.device) -> Tensor:
    """Returns which positions each query sees, bool [length, length]; made once a step."""
    key = _mask, length, reach, device
    found: Tensor | None = plan.derived.get(key)
    if found is None:
        places = torch.arange(length, device=device)
        found = plan.derived[key] = (places[:, None] - places).abs() <= reach
    return found
