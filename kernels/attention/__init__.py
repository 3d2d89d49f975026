"""Attention of many sequences at once over keys and values that lie in pages.

`reference.attend` is the definition, `cpu.attend` the fast path in plain torch (it also runs on
CUDA). `KVCache` owns the cells, `AttentionPlan` says for one step which queries see which cells.
"""

from kernels.attention.cpu import attend
from kernels.attention.kv_cache import KVCache, can_tile, page_bytes
from kernels.attention.plan import AttentionPlan

__all__ = ["AttentionPlan", "KVCache", "attend", "can_tile", "page_bytes"]
