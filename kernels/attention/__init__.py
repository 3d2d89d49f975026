"""Attention of many sequences at once over keys and values that lie in pages.

The functions below run `cpu` or `reference` on CPUs and `triton_ops` on CUDA.

cpu             paged attention in plain torch, shaped for few large operations
kv_cache        the memory of keys and values
native          attention in C++, as operations of a program
native_memory   the workspace of attention in C++, whose size is known before it runs
plan            one step's attention: which queries see which cells
reference       the definitions: one query at a time, in fp32, and what comes before
triton_kernels  the Triton kernels: angles, store, decode, combine, prefill
triton_ops      their launches; grids follow from the plan's sizes alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import cpu, reference
from kernels.attention.kv_cache import KVCache, can_tile, page_bytes
from kernels.attention.plan import AttentionPlan
from kernels.attention.reference import NO_NORMS, HeadNorms
from kernels.dispatch import uses_triton

__all__ = [
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
    """What `reference.attend` defines. q: [T, num_heads, head_dim]; tokens may be apart, a token's
    heads lie side by side."""
    compute = cpu.attend
    if uses_triton(q):
        from kernels.attention import triton_ops  # Triton is an extra that the CPU does without

        compute = triton_ops.attend
    return compute(q, cache, layer, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.rotary_angles`."""
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
) -> None:
    """See `reference.rotate_and_store`."""
    compute = reference.rotate_and_store
    if uses_triton(qkv):
        from kernels.attention import triton_ops

        compute = triton_ops.rotate_and_store
    compute(
        *(qkv, cache, layer, cells, cos, sin, norms),
        num_heads=num_heads,
        is_interleaved=is_interleaved,
        q_scale=q_scale,
    )
