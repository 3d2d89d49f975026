"""Attention of many sequences at once over keys and values that lie in pages.

`attend` runs `cpu.attend`, or on CUDA the kernels of `triton_ops`, as does `rotate_and_store`.

cpu             paged attention in plain torch, shaped for few large operations
kv_cache        the memory of keys and values
native          attention in C++, as operations of a program
native_memory   the workspace of attention in C++, whose size is known before it runs
plan            one step's attention: which queries see which cells
reference       the definition: one query at a time, in fp32
triton_kernels  the Triton kernels: store, decode, combine, prefill
triton_ops      their launches; grids follow from the plan's sizes alone
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention import cpu
from kernels.attention.kv_cache import KVCache, can_tile, page_bytes
from kernels.attention.plan import AttentionPlan

__all__ = ["AttentionPlan", "KVCache", "attend", "can_tile", "page_bytes", "rotate_and_store"]


def attend(
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """What `reference.attend` defines. q: [T, num_heads, head_dim]; tokens may be apart, a token's
    heads lie side by side."""
    if q.device.type == "cpu":
        return cpu.attend(q, cache, layer, plan, scale=scale, window=window)
    from kernels.attention import triton_ops  # Triton is an extra that the CPU does without

    return triton_ops.attend(q, cache, layer, plan, scale=scale, window=window)


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
    """See `triton_ops.rotate_and_store`; on CUDA only."""
    from kernels.attention import triton_ops

    triton_ops.rotate_and_store(qkv, cache, layer, cells, cos, sin, q_norm, k_norm, eps)
