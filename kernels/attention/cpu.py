"""Paged attention in plain torch, shaped for few large operations.

Decode rows of similar context length are gathered together and padded; each row with several
queries (a prompt, or a chunk of one) runs alone. In both, the query heads that share a key head
are computed against it without repeating it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import AttentionPlan, Ints, cells_of

MAX_PADDED_SHARE = 0.25
"""Of a decode group's cells, at most this share may be padding."""
MAX_GROUP_CELLS = 1 << 16
"""Bounds the copy of a group's keys and values."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each. `tokens` [B] (a slice where they are neighbours) and `cells` [B, L];
    padding repeats the row's own last cell, so that no foreign value is ever multiplied, and
    `bias` [B, 1, 1, L] is -inf there (None: nothing is padded)."""

    tokens: Tensor | slice
    cells: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several queries, tokens [start, end), over `cells` [L]. `mask` [queries, L] is true
    where a query sees a cell (None: plainly causal, the queries are the whole context)."""

    start: int
    end: int
    cells: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Schedule:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


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
    """Computes `reference.attend`: q [T, num_heads, head_dim] and sinks float32 [num_heads] give
    [T, num_heads, head_dim]. q may be a strided view with unit stride in its last dimension."""
    schedule = make_schedule(plan, window, q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in schedule.groups:
        _attend_decode(out, q, cache, layer, group, scale, softcap, sinks)
    for chunk in schedule.chunks:
        _attend_chunk(out, q, cache, layer, chunk, scale, softcap, sinks)
    return out


def _attend_decode(
    out: Tensor,
    q: Tensor,
    cache: KVCache,
    layer: int,
    group: DecodeGroup,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    by_key_head = (cache.num_kv_heads, q.shape[1] // cache.num_kv_heads)
    k, v = cache.gather(layer, group.cells)  # [B, L, num_kv_heads, head_dim]
    result = _weighted(
        q[group.tokens].unflatten(1, by_key_head),
        k.transpose(1, 2),
        v.transpose(1, 2),
        group.bias,
        scale,
        softcap,
        None if sinks is None else sinks.view(*by_key_head, 1),
    )
    out[group.tokens] = result.flatten(1, 2)


def _attend_chunk(
    out: Tensor,
    q: Tensor,
    cache: KVCache,
    layer: int,
    chunk: Chunk,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    by_key_head = (cache.num_kv_heads, q.shape[1] // cache.num_kv_heads)
    k, v = cache.gather(layer, chunk.cells)  # [L, num_kv_heads, head_dim]
    # Key heads take the place of the batch, and their query heads the place of the heads, so that
    # sharing a key head is a stride of 0.
    queries = q[chunk.start : chunk.end].unflatten(1, by_key_head)
    result = _weighted(
        queries.permute(1, 2, 0, 3),
        k.transpose(0, 1).unsqueeze(1).expand(*by_key_head, -1, -1),
        v.transpose(0, 1).unsqueeze(1).expand(*by_key_head, -1, -1),
        chunk.mask,
        scale,
        softcap,
        None if sinks is None else sinks.view(*by_key_head, 1, 1),
        is_causal=chunk.mask is None,
    )
    out[chunk.start : chunk.end].unflatten(1, by_key_head).copy_(result.permute(2, 0, 1, 3))


def _weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Attention of q [..., queries, head_dim] over k and v [..., cells, head_dim]. `mask` is -inf,
    or false, where a query does not see a cell; `sinks` fit scores [..., queries, cells]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    if softcap is None:
        scores *= scale
    else:
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        scores += mask
    weights = scores.softmax(-1)
    if sinks is not None:
        # sum / (sum + e^sink), of the scores' sum, which might overflow.
        weights *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
    return torch.matmul(weights.to(q.dtype), v)


def make_schedule(plan: AttentionPlan, window: int | None, dtype: torch.dtype) -> Schedule:
    key = (window, dtype)
    if key not in plan.derived:
        counts = np.diff(plan.host_query_starts)
        plan.derived[key] = Schedule(
            groups=tuple(
                _decode_group(plan, rows, window, dtype)
                for rows in _similar_rows(plan, np.flatnonzero(counts == 1), window)
            ),
            chunks=tuple(_chunk(plan, int(row), window) for row in np.flatnonzero(counts > 1)),
        )
    schedule: Schedule = plan.derived[key]
    return schedule


def _num_seen(plan: AttentionPlan, rows: Ints, window: int | None) -> Ints:
    contexts = plan.host_context_lengths[rows]
    return contexts if window is None else np.minimum(contexts, window)


def _similar_rows(plan: AttentionPlan, rows: Ints, window: int | None) -> list[Ints]:
    """Splits decode rows, longest first, wherever the padding or the copy would grow too large."""
    lengths = _num_seen(plan, rows, window)
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    longest = cells = 0
    for row, length in zip(rows[order].tolist(), lengths[order].tolist(), strict=True):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        cells += length
        too_large = padded > MAX_GROUP_CELLS or cells < padded * (1 - MAX_PADDED_SHARE)
        if not groups or too_large:
            groups.append([])
            longest, cells = length, length
        groups[-1].append(row)
    return [np.asarray(sorted(group)) for group in groups]


def _decode_group(
    plan: AttentionPlan, rows: Ints, window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    contexts = plan.host_context_lengths[rows][:, None]
    lengths = _num_seen(plan, rows, window)[:, None]
    columns = np.arange(lengths.max())[None, :]
    positions = contexts - lengths + np.minimum(columns, lengths - 1)
    cells = cells_of(plan.host_page_table, rows[:, None], positions, plan.page_size)
    bias = None
    if (lengths != lengths[0]).any():
        padding = torch.from_numpy(columns >= lengths).view(len(rows), 1, 1, -1)
        bias = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
        bias = bias.to(plan.device)
    tokens = plan.host_query_starts[rows]
    are_neighbours = tokens[-1] - tokens[0] == len(tokens) - 1
    return DecodeGroup(
        tokens=slice(int(tokens[0]), int(tokens[-1]) + 1)
        if are_neighbours
        else torch.from_numpy(tokens).to(plan.device),
        cells=torch.from_numpy(cells).to(plan.device),
        bias=bias,
    )


def _chunk(plan: AttentionPlan, row: int, window: int | None) -> Chunk:
    start, end = plan.host_query_starts[row : row + 2].tolist()
    context = int(plan.host_context_lengths[row])
    first_query = context - (end - start)
    first = 0 if window is None else max(0, first_query - window + 1)
    seen = np.arange(first, context)
    cells = cells_of(plan.host_page_table, np.asarray(row), seen, plan.page_size)
    mask = None
    ends = None if plan.ends is None else plan.ends[start:end].numpy()
    if ends is not None or first_query > 0 or (window is not None and window < context):
        queries = np.arange(first_query, context)[:, None]
        visible = seen[None, :] <= queries
        if ends is not None:
            visible |= seen[None, :] < ends[:, None]
        if window is not None:
            visible &= seen[None, :] > queries - window
        mask = torch.from_numpy(visible).to(plan.device)
    return Chunk(start, end, torch.from_numpy(cells).to(plan.device), mask)
