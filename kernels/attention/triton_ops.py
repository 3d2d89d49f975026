"""Launches of the Triton kernels. Grids and shapes follow from the plan's sizes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import triton_kernels as kernels
from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import TILE_QUERIES, AttentionPlan
from kernels.elementwise.triton_ops import power_of_2

DECODE_PROGRAMS = 1024
"""How many programs few rows are split into: what keeps a large device's memory busy."""
MAX_SPLITS = 64
BLOCK_N, WIDE_BLOCK_N = 64, 32
"""Positions that a program takes at once; of prompts with heads wider than 128 fewer, so that its
registers suffice."""
MANY_TOKENS = 256
"""From here on a program stores several tokens."""


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Shares of the context, each with programs of its own: a power of 2."""
    splits = 1
    while splits < MAX_SPLITS and splits * num_rows * num_kv_heads < DECODE_PROGRAMS:
        splits *= 2
    return splits


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.rotary_angles`."""
    num_tokens, half = len(positions), len(inverse_frequencies)
    cos, sin = (
        torch.empty((num_tokens, 1, 2 * half), dtype=dtype, device=positions.device)
        for _ in range(2)
    )
    kernels.rotary_angles_kernel[(num_tokens,)](
        cos,
        sin,
        positions,
        inverse_frequencies,
        float(scaling),
        HALF=half,
        BLOCK=power_of_2(half),
        num_warps=1,
    )
    return cos, sin


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
    """See `reference.rotate_and_store`. Rows of qkv have unit stride; its k stays as it is."""
    assert not cache.is_tiled, "the kernels read caches in rows"
    head_dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    assert qkv.stride(1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    block_t = 1 if num_tokens < MANY_TOKENS else 8
    kv = cache.data[layer]
    kernels.store_kernel[(-(-num_tokens // block_t), width // head_dim)](
        qkv,
        kv,
        cells,
        cos,
        sin,
        q_norm,
        k_norm,
        num_tokens,
        eps,
        qkv.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=cache.page_size,
        HALF=head_dim // 2,
        BLOCK_H=power_of_2(head_dim // 2),
        BLOCK_T=block_t,
        num_warps=1 if block_t == 1 else 4,
    )


def attend(
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `reference.attend`. Heads of a token lie side by side; tokens may be apart."""
    assert not cache.is_tiled, "the kernels read caches in rows"
    assert q.stride(1) == q.shape[2], "heads lie side by side"
    assert q.stride(2) == 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan.has_decodes:
        _decode(out, q, cache, layer, plan, scale, window or 0)
    if len(plan.tiles):
        _prefill(out, q, cache, layer, plan, scale, window or 0)
    return out


def _decode(
    out: Tensor, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float,
    window: int,
) -> None:  # fmt: skip
    num_rows, num_heads, head_dim = len(plan.context_lengths), q.shape[1], cache.head_dim
    splits = num_splits(num_rows, cache.num_kv_heads)
    parts = lses = None
    if splits > 1:
        shape = (num_rows, num_heads, splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    group, kv = num_heads // cache.num_kv_heads, cache.data[layer]
    kernels.decode_kernel[(num_rows, cache.num_kv_heads, splits)](
        out,
        parts,
        lses,
        q,
        kv,
        plan.query_starts,
        plan.context_lengths,
        plan.table_rows,
        plan.page_table,
        scale,
        q.stride(0),
        plan.page_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        NUM_KV_HEADS=cache.num_kv_heads,
        G=group,
        D=head_dim,
        PAGE_SIZE=cache.page_size,
        WINDOW=window,
        SPLITS=splits,
        BLOCK_G=max(16, power_of_2(group)),
        BLOCK_D=max(16, power_of_2(head_dim)),
        BLOCK_N=BLOCK_N,
        PRECISION="ieee",
        num_warps=4,
    )
    if splits > 1:
        kernels.combine_kernel[(num_rows, num_heads)](
            out,
            parts,
            lses,
            plan.query_starts,
            NUM_HEADS=num_heads,
            D=head_dim,
            SPLITS=splits,
            BLOCK_D=max(16, power_of_2(head_dim)),
            num_warps=4,
        )


def _prefill(
    out: Tensor, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float,
    window: int,
) -> None:  # fmt: skip
    num_heads, kv = q.shape[1], cache.data[layer]
    kernels.prefill_kernel[(len(plan.tiles), num_heads)](
        out,
        q,
        kv,
        plan.tiles,
        plan.query_starts,
        plan.context_lengths,
        plan.table_rows,
        plan.page_table,
        scale,
        q.stride(0),
        plan.page_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        NUM_HEADS=num_heads,
        G=num_heads // cache.num_kv_heads,
        D=cache.head_dim,
        PAGE_SIZE=cache.page_size,
        WINDOW=window,
        BLOCK_M=TILE_QUERIES,
        BLOCK_D=max(16, power_of_2(cache.head_dim)),
        BLOCK_N=BLOCK_N if cache.head_dim <= 128 else WIDE_BLOCK_N,
        PRECISION="ieee",
        num_warps=4,
    )
