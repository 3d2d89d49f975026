"""Launches of the Triton kernels. Grids and shapes follow from the plan's sizes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import tuning
from kernels.attention import triton_kernels as kernels
from kernels.attention.kv_cache import KVCache
from kernels.attention.plan import MAX_SEGMENTS, TILE_QUERIES, AttentionPlan
from kernels.attention.reference import NO_NORMS, HeadNorms
from kernels.elementwise.addend import Addend
from kernels.elementwise.triton_ops import power_of_2

MIN_BLOCK = 16
"""The smallest side of a product on tensor cores."""
MAX_REGISTERS = 255
"""Of a thread, on all devices."""
MIN_BLOCK_ROWS = 32
"""Rows are found among so many at least: small batches share a compilation."""


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launches `reference.rotary_angles`: positions int64 [T], or [T, D / 2] with columns that are
    contiguous, and inverse_frequencies float32 [D / 2] give cos and sin [T, 1, D] of `dtype`."""
    num_tokens, half = len(positions), len(inverse_frequencies)
    is_of_pairs = positions.dim() == 2
    assert positions.t().is_contiguous()  # of [T], too
    assert not is_of_pairs or positions.shape[1] == half
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
        num_tokens if is_of_pairs else 0,
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
    cos: Tensor | None,
    sin: Tensor | None,
    norms: HeadNorms = NO_NORMS,
    *,
    num_heads: int,
    is_interleaved: bool = False,
    q_scale: Tensor | None = None,
    addend: Addend | None = None,
) -> None:
    """Launches `reference.rotate_and_store`: qkv [T, size] of the cache's dtype with rows of unit
    stride, cells int64 [T], cos and sin [T, 1, <= head_dim], q_scale [T], addend [T, size]; qkv is
    contiguous then, and no norm is over all heads."""
    assert not cache.is_tiled, "the kernels read caches in rows"
    head_dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    num_tokens, num_stored = len(qkv), qkv.shape[1] // head_dim - num_heads
    assert num_stored in (0, num_kv_heads, 2 * num_kv_heads)
    assert qkv.stride(1) == 1
    for waves in (cos, sin):
        assert waves is None or waves.is_contiguous()
    values_are_keys = num_stored == num_kv_heads
    values, slots = addend or (None, None)
    if values is not None:
        assert qkv.is_contiguous()
        assert values.is_contiguous()
        assert values.shape == qkv.shape
        for norm in (norms.q, norms.k):
            assert norm is None or norm.shape[-1] == head_dim, "norms of all heads read qkv before"
    norms = _norm_wide(qkv, norms, cache, num_heads, values_are_keys=values_are_keys)
    half = head_dim // 2 if cos is None else cos.shape[-1] // 2
    tuned = tuning.constants("store", head_dim=head_dim)
    tokens_each = 1 if num_tokens < tuned["many_tokens"] else tuned["tokens_each"]
    kv = cache.data[layer]
    num_computed = num_heads + (2 * num_kv_heads if num_stored else 0)
    kernels.store_kernel[(-(-num_tokens // tokens_each), num_computed)](
        qkv,
        kv,
        cache.scales_of(layer),
        cells,
        cos,
        sin,
        norms.q,
        norms.k,
        norms.v,
        q_scale,
        values,
        slots,
        num_tokens,
        tokens_each,
        norms.eps,
        qkv.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=cache.page_size,
        D=head_dim,
        HALF=half,
        IS_INTERLEAVED=is_interleaved,
        NORMS_ROTATED=norms.are_rotated,
        VALUES_ARE_KEYS=values_are_keys,
        Q_OF_TOKENS=_is_of_tokens(norms.q),
        K_OF_TOKENS=_is_of_tokens(norms.k),
        V_OF_TOKENS=_is_of_tokens(norms.v),
        BLOCK_H=power_of_2(half),
        BLOCK_R=power_of_2(max(1, head_dim - 2 * half)),
        num_warps=1,
    )


def _norm_wide(
    qkv: Tensor, norms: HeadNorms, cache: KVCache, num_heads: int, *, values_are_keys: bool
) -> HeadNorms:
    """Computes the norms over all heads, in place; returns the others."""
    head_dim, start = cache.head_dim, num_heads * cache.head_dim
    assert norms.v is None or norms.v.shape[-1] == head_dim, "values have norms of heads"
    if norms.q is not None and norms.q.shape[-1] != head_dim:
        assert not norms.are_rotated, "norms of all heads come first"
        _norm_rows(qkv[:, :start], norms.q, norms.eps)
        norms = norms._replace(q=None)
    if norms.k is not None and norms.k.shape[-1] != head_dim:
        assert not norms.are_rotated, "norms of all heads come first"
        assert not values_are_keys, "values are what keys are before their norm"
        _norm_rows(qkv[:, start : start + norms.k.shape[-1]], norms.k, norms.eps)
        norms = norms._replace(k=None)
    return norms


def _is_of_tokens(weight: Tensor | None) -> bool:
    """Returns whether each token has a weight of its own, [T, size]."""
    return weight is not None and weight.dim() == 2


def _norm_rows(x: Tensor, weight: Tensor, eps: float) -> None:
    """x = RMSNorm(x) * weight, in place; rows may be apart."""
    size = x.shape[1]
    block, tuned = power_of_2(size), tuning.constants("add_rms_norm", size=size)
    kernels.norm_rows_kernel[(len(x),)](
        x,
        weight,
        eps,
        x.stride(0),
        SIZE=size,
        OF_TOKENS=_is_of_tokens(weight),
        BLOCK=block,
        num_warps=min(tuned["max_warps"], max(1, block // tuned["elements_per_warp"])),
    )


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
    """Launches `reference.attend`: q [T, num_heads, head_dim] and sinks float32 [num_heads] give
    [T, num_heads, head_dim]. Heads of a token are contiguous; tokens may be strided."""
    assert not cache.is_tiled, "the kernels read caches in rows"
    assert q.stride(1) == q.shape[2], "heads lie side by side"
    assert q.stride(2) == 1
    if sinks is not None:
        assert sinks.dtype == torch.float32
        assert sinks.shape == (q.shape[1],)
        assert sinks.is_contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan.has_decodes:
        _decode(out, q, cache, layer, plan, scale, window or 0, softcap or 0.0, sinks)
    if len(plan.tiles):
        _prefill(out, q, cache, layer, plan, scale, window or 0, softcap or 0.0, sinks)
    return out


def _decode(
    out: Tensor, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float,
    window: int, softcap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    num_rows, num_heads, head_dim = len(plan.context_lengths), q.shape[1], cache.head_dim
    tuned = tuning.constants("decode", head_dim=head_dim)
    shape = (plan.max_segments, num_heads)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    group, kv = num_heads // cache.num_kv_heads, cache.data[layer]
    num_programs = min(tuned["programs"], plan.max_segments * cache.num_kv_heads)
    kernels.decode_kernel[(num_programs,)](
        parts,
        lses,
        q,
        kv,
        cache.scales_of(layer),
        plan.query_starts,
        plan.context_lengths,
        plan.table_rows,
        plan.page_table,
        plan.segment_starts,
        num_rows,
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
        SOFTCAP=softcap,
        BLOCK_ROWS=max(MIN_BLOCK_ROWS, power_of_2(num_rows)),
        BLOCK_G=max(MIN_BLOCK, power_of_2(group)),
        BLOCK_D=max(MIN_BLOCK, power_of_2(head_dim)),
        BLOCK_N=tuned["block_n"],
        PRECISION="ieee",
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
    )
    tuned = tuning.constants("combine", head_dim=head_dim)
    kernels.combine_kernel[(num_rows, num_heads)](
        out,
        parts,
        lses,
        sinks,
        plan.query_starts,
        plan.segment_starts,
        NUM_HEADS=num_heads,
        D=head_dim,
        MAX_SEGMENTS=MAX_SEGMENTS,
        BLOCK_S=tuned["block_s"],
        BLOCK_D=max(MIN_BLOCK, power_of_2(head_dim)),
        num_warps=tuned["num_warps"],
    )


def _limit(num_registers: int) -> dict[str, int]:
    """Returns the launch's limit of registers. Even the largest one makes the assembler choose
    otherwise, so that it is left out."""
    return {"maxnreg": num_registers} if num_registers < MAX_REGISTERS else {}


def _prefill(
    out: Tensor, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float,
    window: int, softcap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    num_heads, kv = q.shape[1], cache.data[layer]
    tuned = tuning.constants("prefill", head_dim=cache.head_dim, itemsize=q.itemsize)
    parts, rest = divmod(TILE_QUERIES, tuned["block_m"])
    assert rest == 0, "blocks of queries fill a tile"
    assert parts > 0
    kernels.prefill_kernel[(num_heads, len(plan.tiles) * parts)](
        out,
        q,
        kv,
        cache.scales_of(layer),
        sinks,
        plan.ends,
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
        SOFTCAP=softcap,
        PARTS=parts,
        BLOCK_M=tuned["block_m"],
        BLOCK_D=max(MIN_BLOCK, power_of_2(cache.head_dim)),
        BLOCK_N=tuned["block_n"],
        PRECISION="ieee",
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
        **_limit(tuned["max_registers"]),
    )
