"""The definition of paged attention: one query at a time, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import AttentionPlan


def attend(
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """out[t, h] = sum_j softmax_j(scale * q[t, h] . K[j, h // group]) V[j, h // group]

    over the positions j of t's own sequence with j <= p and, under a sliding `window`,
    j > p - window, where p is t's position. group = num_heads / num_kv_heads.

    q: [T, num_heads, head_dim]; returns [T, num_heads, head_dim] in q's dtype. The step's own keys
    and values must have been written to the cache before.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // cache.num_kv_heads
    query_starts = plan.query_starts.tolist()
    for row, context in enumerate(plan.context_lengths.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        for token in range(start, end):
            position = context - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(first, position + 1, device=q.device)
            pages = plan.page_table[row, seen // plan.page_size].long()
            k, v = cache.gather(layer, pages * plan.page_size + seen % plan.page_size)
            k = k.float().repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
            v = v.float().repeat_interleave(group, dim=1)
            scores = scale * torch.einsum("hd,jhd->hj", q[token].float(), k)
            out[token] = torch.einsum("hj,jhd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
