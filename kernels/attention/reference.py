"""The definitions: paged attention one query at a time in fp32, after norms and rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import AttentionPlan
from kernels.elementwise.addend import Addend
from kernels.elementwise.reference import rms_norm


class HeadNorms(NamedTuple):
    """Weights of RMSNorms of queries, keys and values. Each is [head_dim] over a head, [size] over
    all heads, [T, the same] with one per token, or None. `are_rotated`: q and k are normed after
    the rotation."""

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

    The sum is over the positions j <= p of t's own sequence, where p is t's position, or over j <
    plan.ends[t] if the plan has ends. With a sliding `window`, j > p - window as well. group =
    num_heads / num_kv_heads. score(q, k) = scale * q . k; with a cap (Bello et al., 2016), softcap
    * tanh(scale * q . k / softcap). K and V are the cache's, codes in FP8 times their scales.

    With `sinks` (GPT-OSS) the softmax of head h has one more score, sinks[h]. It is neither scaled
    nor capped and has no value: if all other scores are far below it, out is nearly zero.

    Args:
        q: [T, num_heads, head_dim].
        cache: The cache, which already has the step's own keys and values.
        layer: Index of the layer in the cache.
        plan: Which queries see which cells.
        scale: Factor of the scores.
        window: Most recent positions that a query sees, with its own. None: all.
        softcap: Bound of the scores. None: none.
        sinks: float32 [num_heads]. None: none.

    Returns:
        [T, num_heads, head_dim] of q's dtype.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // cache.num_kv_heads
    query_starts, table_rows = plan.query_starts.tolist(), plan.table_rows.tolist()
    ends = None if plan.ends is None else plan.ends.tolist()
    for row, context in enumerate(plan.context_lengths.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        for token in range(start, end):
            position = context - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            last = position if ends is None else max(position, ends[token] - 1)
            seen = torch.arange(first, last + 1, device=q.device)
            pages = plan.page_table[table_rows[row], seen // plan.page_size].long()
            cells = pages * plan.page_size + seen % plan.page_size
            k, v = (
                side.repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
                for side in cache.gather(layer, cells, torch.float32)
            )
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
    """Computes cos and sin of rotary embedding (Su et al., 2021) in fp32, times `scaling`.

    Args:
        positions: int64 [T], or [T, D / 2]: of each pair.
        inverse_frequencies: float32 [D / 2], in radians per position.
        scaling: Factor of cos and sin.
        dtype: The dtype of the result.

    Returns:
        cos and sin, [T, 1, D] of `dtype`, with both halves next to each other. sin has the sign of
        the rotation.
    """
    angles = positions.float().view(len(positions), 1, -1) * inverse_frequencies
    cos, sin = ((wave * scaling).to(dtype) for wave in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotates the first elements of each head, as many as `cos` has.

    Args:
        heads: [T, num_heads, D].
        cos: [T, 1, <= D] of heads' dtype.
        sin: As cos.
        is_interleaved: Whether element i is rotated with its neighbour; otherwise with element i +
            half of the rotated size.

    Returns:
        [T, num_heads, D] of heads' dtype.
    """
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
    addend: Addend | None = None,
) -> None:
    """q[t] = q_scale[t] * rotate(norm(q[t])) in place; cell cells[t] gets rotate(norm(k[t])) and
    norm(v[t]). With `norms.are_rotated`, the rotation comes first.

    Args:
        qkv: [T, q | k | v of all heads]; the values of k and v are undefined afterwards. With
            [T, q | k], v is k before its norm. With [T, q], nothing is stored.
        cache: The cache to write to.
        layer: Index of the layer in the cache.
        cells: int64 [T].
        cos: [T, 1, <= head_dim] from `rotary_angles`. None: no rotation.
        sin: As cos.
        norms: Weights of the norms of heads.
        num_heads: Number of query heads.
        is_interleaved: As in `rotate`.
        q_scale: [T]. None: 1.
        addend: Adapters' addition to qkv before anything else, as qkv. None: none.
    """
    if addend is not None:
        qkv.copy_(addend.added_to(qkv))
    head_dim = cache.head_dim
    num_keys = min(cache.num_kv_heads, qkv.shape[1] // head_dim - num_heads)
    turned = qkv[:, : (num_heads + num_keys) * head_dim].unflatten(1, (-1, head_dim))
    q, k = turned.split((num_heads, num_keys), dim=1)
    kv = qkv[:, num_heads * head_dim :]
    if kv.shape[1] == num_keys * head_dim:
        kv = torch.cat((kv, kv), dim=1)  # a copy of k that the norms of k do not reach
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
