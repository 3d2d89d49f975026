"""The memory that attention in C++ computes in, as `attention.h` and `attention_state.h` in
`kernels/native/src` lay it out: its size is known before any of it is there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.attention.kv_cache import TILE_CELLS, KVCache

BLOCK_ROWS = 64
"""Queries times heads of one work item, unless a single query's heads are more."""
SPLIT_ROWS = 16
"""Work items of at most so many may be split over their context."""
_BLOCK_CELLS = 64
_SPAN_CELLS = 8192
_MAX_PARTS = 18
_MAX_PRODUCT_ROWS = 16
_SLOTS_PER_THREAD = 8


class WorkItem(ctypes.Structure):
    """`AttentionItem` in attention.h, which C++ alone fills and reads."""

    _fields_ = tuple((f"field{i}", ctypes.c_int32) for i in range(11))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions that the memory of attention depends on, with the step and the threads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int

    @classmethod
    def of(cls, cache: KVCache, num_heads: int) -> AttentionShape:
        return cls(num_heads, cache.num_kv_heads, cache.head_dim, cache.dtype.itemsize)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_rows(self) -> int:
        return max(BLOCK_ROWS, self.group)

    @property
    def block_queries(self) -> int:
        return self.block_rows // self.group

    @property
    def split_rows(self) -> int:
        return max(SPLIT_ROWS, self.group)

    @property
    def partial_floats(self) -> int:
        """Of a split item's part, as `State` in attention_state.h, for the widest vectors."""
        return self.split_rows * (self._width + 16) + -(-self.split_rows // 16) * 16

    @property
    def thread_bytes(self) -> int:
        """Of one thread, as attention_state.h carves it up, for the widest vectors."""
        rows = self.block_rows
        state_bytes = 4 * (rows * (self._width + 16) + rows + 16)
        tile_bytes = (rows + 2 * _BLOCK_CELLS) * self._width * self.item_bytes
        block_bytes = _MAX_PRODUCT_ROWS * _BLOCK_CELLS * (4 + self.item_bytes)
        scale_bytes = 2 * _BLOCK_CELLS * 4
        num_bytes = 2 * state_bytes + tile_bytes + block_bytes + scale_bytes
        return -(-(num_bytes + 9 * 64) // 64) * 64

    @property
    def _width(self) -> int:
        return -(-self.head_dim // TILE_CELLS) * TILE_CELLS

    def max_items(self, max_tokens: int, max_rows: int, max_threads: int) -> int:
        """Work items of a step at most."""
        # A row is cut where it passes a multiple of _SPAN_CELLS: once, however short, and then once
        # for so many tokens. Every stretch has at most one block that is not full.
        stretches = 2 * max_rows + max_tokens // _SPAN_CELLS
        blocks = max_tokens // self.block_queries + stretches
        return self.num_kv_heads * blocks + _SLOTS_PER_THREAD * max_threads * _MAX_PARTS

    def num_bytes(
        self, max_tokens: int, max_rows: int, max_threads: int, num_kinds: int = 1
    ) -> int:
        """Of the scratch memory, and of the work items of so many kinds of layers."""
        items = num_kinds * self.max_items(max_tokens, max_rows, max_threads)
        num_slots = _SLOTS_PER_THREAD * max_threads
        slot_bytes = 4 + _MAX_PARTS * self.partial_floats * 4
        scratch_bytes = num_slots * slot_bytes + max_threads * self.thread_bytes + 64
        return items * ctypes.sizeof(WorkItem) + num_kinds * 4 + scratch_bytes


class AttentionScratch:
    """The workspace of work items, for up to `max_threads` threads; further threads take no part.
    Operations run one after the other, so those of every layer and window share it."""

    def __init__(self, shape: AttentionShape, max_threads: int | None = None) -> None:
        self.shape = shape
        self.max_threads = torch.get_num_threads() if max_threads is None else max_threads
        num_slots = _SLOTS_PER_THREAD * self.max_threads
        self.arrived = torch.zeros(num_slots, dtype=torch.int32)
        self.partials = torch.zeros(num_slots * _MAX_PARTS * shape.partial_floats)
        num_bytes = self.max_threads * shape.thread_bytes + 64
        self.threads = torch.zeros(num_bytes, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self.arrived.nbytes + self.partials.nbytes + self.threads.nbytes
