"""The definitions: paged attention one query at a time, in fp32, and what comes before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import AttentionPlan
from kernels.elementwise.reference import rms_norm


class HeadNorms(NamedTuple):
    """Weights of RMSNorms of queries, keys and values: each over a head, [head_dim], or over all
    heads, or of each token, [T, the same], or None. `are_rotated`: norms of q and k come behind the
    rotation."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    eps: float = 0.0
    are_rotated: bool = False


NO_NORMS = HeadNorms()


def attend(
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """out[t, h] = sum_j softmax_j(score(q[t, h], K[j, h // group])) V[j, h // group]

    over the positions j of t's own sequence with j <= p and, under a sliding `window`,
    j > p - window, where p is t's position. group = num_heads / num_kv_heads; score(q, k) = scale *
    q . k, or, with a cap (Bello et al., 2016), softcap * tanh(scale * q . k / softcap).

    With `sinks` (GPT-OSS) the softmax of head h has one more score, sinks[h], neither scaled nor
    capped, which has no value: where all others are far below it, out is nearly zero.

    q: [T, num_heads, head_dim]; sinks: float32 [num_heads]; returns [T, num_heads, head_dim] in q's
    dtype. The step's own keys and values must have been written to the cache before.
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
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(seen)]
            out[token] = torch.einsum("hj,jhd->hd", weights, v).to(q.dtype)
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


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Returns heads [T, num_heads, D] of whose first elements, as many as `cos` has, element i is
    rotated with element i + half of them, or, interleaved, with its neighbour."""
    size = cos.shape[-1]
    turned = heads[..., :size]
    if is_interleaved:
        cos, sin = (torch.stack(wave.chunk(2, dim=-1), dim=-1).flatten(-2) for wave in (cos, sin))
        swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = turned.roll(size // 2, dims=-1)
    turned = (turned * cos).addcmul_(swapped, sin)
    return turned if size == heads.shape[-1] else torch.cat((turned, heads[..., size:]), dim=-1)


def rotate_and_store(
    qkv: Tensor,
    cache: KVCache,
    layer: int,
    cells: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: HeadNorms = NO_NORMS,
    *,
    num_heads: int,
    is_interleaved: bool = False,
    q_scale: Tensor | None = None,
) -> None:
    """q[t] = q_scale[t] * rotate(norm(q[t])) in place; cell cells[t] gets rotate(norm(k[t])) and
    norm(v[t]); with `norms.are_rotated` they are rotated first.

    qkv: [T, q | k | v of all heads], of whose k and v nothing is said afterwards; [T, q | k]: v is
    what k is before its norm; [T, q]: nothing is stored. cells: int64 [T]; cos, sin: [T, 1, at most
    D] of `rotary_angles`, None: nothing is rotated; q_scale: [T], None: 1.
    """
    head_dim = cache.head_dim
    num_keys = min(cache.num_kv_heads, qkv.shape[1] // head_dim - num_heads)
    turned = qkv[:, : (num_heads + num_keys) * head_dim].unflatten(1, (-1, head_dim))
    q, k = turned.split((num_heads, num_keys), dim=1)
    kv = qkv[:, num_heads * head_dim :]
    if kv.shape[1] == num_keys * head_dim:
        kv = torch.cat((kv, kv), dim=1)  # what k is at first, where norms of k do not reach it
    v = kv[:, num_keys * head_dim :].unflatten(1, (-1, head_dim))

    def rotate_all() -> None:
        if cos is not None and sin is not None:
            turned.copy_(rotate(turned, cos, sin, is_interleaved=is_interleaved))

    if norms.are_rotated:
        rotate_all()
    for heads, weight in ((q, norms.q), (k, norms.k), (v, norms.v)):
        if weight is not None and heads.numel():
            over = heads if weight.shape[-1] == head_dim else heads.flatten(1)
            if weight.dim() > 1 and over is heads:
                weight = weight[:, None]
            heads.copy_(rms_norm(over, weight, norms.eps).view(heads.shape))
    if not norms.are_rotated:
        rotate_all()
    if q_scale is not None:
        q *= q_scale[:, None, None]
    if num_keys:
        if kv.data_ptr() != k.data_ptr():
            kv[:, : num_keys * head_dim] = k.flatten(1)
        cache.write(layer, cells, kv)
