"""Attention of many sequences at once over keys and values that lie in pages.

The functions below run `cpu` or `reference` on CPUs and `triton_ops` on CUDA.

both_ways         attention without a causal mask, of whole prompts, without pages
cpu               paged attention in plain torch, shaped for few large operations
kv_cache          the memory of keys and values
native            attention in C++, as operations of a program
native_both_ways  attention without a causal mask in C++
native_memory     the workspace of attention in C++, whose size is known before it runs
plan              one step's attention: which queries see which cells
reference         the definitions: one query at a time, in fp32, after norms and rotation
triton_heads      parts of the Triton kernels that prepare heads: norms, rotation, store
triton_kernels    the Triton kernels: angles, store, decode, combine, prefill
triton_ops        their launches; grids follow from the plan's sizes alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import cpu, reference
from kernels.attention.kv_cache import FP8, KVCache, can_tile, page_bytes
from kernels.attention.plan import AttentionPlan
from kernels.attention.reference import NO_NORMS, HeadNorms
from kernels.dispatch import uses_triton
from kernels.elementwise.addend import Addend

__all__ = [
    "FP8",
    "NO_NORMS",
    "AttentionPlan",
    "HeadNorms",
    "KVCache",
    "attend",
    "can_tile",
    "page_bytes",
    "rotary_angles",
    "rotate_and_store",
]


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
    """Attends from each query to the keys and values of its own sequence; see `reference.attend`.

    Args:
        q: Queries [T, num_heads, head_dim] of the cache's dtype. Tokens may be strided; the heads
            of a token are contiguous.
        cache: The cache, which already has the step's own keys and values.
        layer: Index of the layer in the cache.
        plan: Which queries see which cells.
        scale: Factor of the scores.
        window: Most recent positions that a query sees, with its own. None: all.
        softcap: Bound of the scores. None: none.
        sinks: Extra score of each head, float32 [num_heads]. None: none.

    Returns:
        [T, num_heads, head_dim] of q's dtype, contiguous.
    """
    compute = cpu.attend
    if uses_triton(q):
        from kernels.attention import triton_ops  # Triton is an extra that the CPU does without

        compute = triton_ops.attend
    return compute(q, cache, layer, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Computes cos and sin of rotary embedding; see `reference.rotary_angles`.

    Args:
        positions: int64 [T], or [T, D / 2], of each pair, with columns that are contiguous.
        inverse_frequencies: float32 [D / 2], in radians per position.
        scaling: Factor of cos and sin.
        dtype: The dtype of the result.

    Returns:
        cos and sin, [T, 1, D] of `dtype`; sin has the sign of the rotation.
    """
    if uses_triton(positions):
        from kernels.attention import triton_ops

        return triton_ops.rotary_angles(positions, inverse_frequencies, scaling, dtype)
    return reference.rotary_angles(positions, inverse_frequencies, scaling, dtype)


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
    """Norms and rotates a step's heads, and stores keys and values; see
    `reference.rotate_and_store`.

    Args:
        qkv: [T, size] of the cache's dtype: q, then k and v, of all heads. Overwritten.
        cache: The cache to write to.
        layer: Index of the layer in the cache.
        cells: Cell of each token, int64 [T].
        cos: [T, 1, <= head_dim] from `rotary_angles`. None: no rotation.
        sin: As cos.
        norms: Weights of the norms of heads.
        num_heads: Number of query heads.
        is_interleaved: Whether neighbouring elements are rotated together, not halves.
        q_scale: Factor of each token's queries, [T]. None: 1.
        addend: Adapters' addition to qkv before anything else; norms are of each head then. None:
            none.
    """
    compute = reference.rotate_and_store
    if uses_triton(qkv):
        from kernels.attention import triton_ops

        compute = triton_ops.rotate_and_store
    compute(
        qkv,
        cache,
        layer,
        cells,
        cos,
        sin,
        norms,
        num_heads=num_heads,
        is_interleaved=is_interleaved,
        q_scale=q_scale,
        addend=addend,
    )
