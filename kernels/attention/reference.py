"""The definitions: paged attention one query at a time, in fp32, and what comes before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import AttentionPlan
from kernels.elementwise.reference import rms_norm


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
    query_starts, table_rows = plan.query_starts.tolist(), plan.table_rows.tolist()
    for row, context in enumerate(plan.context_lengths.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        for token in range(start, end):
            position = context - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(first, position + 1, device=q.device)
            pages = plan.page_table[table_rows[row], seen // plan.page_size].long()
            k, v = cache.gather(layer, pages * plan.page_size + seen % plan.page_size)
            k = k.float().repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
            v = v.float().repeat_interleave(group, dim=1)
            scores = scale * torch.einsum("hd,jhd->hj", q[token].float(), k)
            out[token] = torch.einsum("hj,jhd->hd", scores.softmax(-1), v).to(q.dtype)
    return out


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [T, 1, D] of rotary embedding (Su et al., 2021), computed in fp32, times
    `scaling`, in `dtype`; both halves side by side, sin with the sign of the rotation.

    positions: int64 [T]; inverse_frequencies: fp32 [D / 2].
    """
    angles = positions[:, None, None].float() * inverse_frequencies
    cos, sin = ((wave * scaling).to(dtype) for wave in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [T, num_heads, D] with element i rotated with element i + D / 2."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).addcmul_(swapped, sin)


def rotate_and_store(
    qkv: Tensor,
    cache: KVCache,
    layer: int,
    cells: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """q[t] = rotate(norm(q[t])) in place; cell cells[t] gets rotate(norm(k[t])) and v[t].

    qkv: [T, q | k | v of all heads], of whose k nothing is said afterwards; cells: int64 [T]; cos,
    sin: [T, 1, D] of `rotary_angles`; q_norm, k_norm: weights [D] of an RMSNorm over a head, or
    None.
    """
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    turned = qkv[:, : (num_heads + num_kv_heads) * head_dim].unflatten(1, (-1, head_dim))
    q, k = turned.split((num_heads, num_kv_heads), dim=1)
    for heads, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            heads.copy_(rms_norm(heads, weight, eps))
    turned.copy_(rotate(turned, cos, sin))
    cache.write(layer, cells, qkv[:, num_heads * head_dim :])
