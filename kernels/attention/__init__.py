"""Attention of many sequences at once over keys and values that lie in pages.

`reference.attend` is the definition; `attend` runs `cpu.attend` in plain torch, or on CUDA the
kernels of `triton_ops`, which also has `rotate_and_store`. `KVCache` owns the cells,
`AttentionPlan` says for one step which queries see which cells.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention import cpu
from kernels.attention.kv_cache import KVCache, can_tile, page_bytes
from kernels.attention.plan import AttentionPlan

__all__ = ["AttentionPlan", "KVCache", "attend", "can_tile", "page_bytes"]


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
