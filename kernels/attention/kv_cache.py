"""The memory of keys and values.

A cell holds the keys and the values of one token in one layer, side by side, so that one copy
writes both and one gather reads both: `[K of all heads | V of all heads]`. A page is `page_size`
neighbouring cells; cell c of page p is number `p * page_size + c`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.host_memory import allocate_host


def page_bytes(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one page, over all layers."""
    return num_layers * page_size * 2 * num_kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """`data` is `[num_layers, num_pages * page_size, 2 * num_kv_heads * head_dim]`.

    Every page is usable; a cell's content is meaningless until it is written.
    """

    data: Tensor
    page_size: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        shape = (num_layers, num_pages * page_size, 2 * num_kv_heads * head_dim)
        if torch.device(device).type == "cpu":
            data = allocate_host(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            data = torch.zeros(shape, dtype=dtype, device=device)
        return cls(data, page_size, num_kv_heads, head_dim)

    @property
    def num_pages(self) -> int:
        return self.data.shape[1] // self.page_size

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, cells: Tensor, kv: Tensor) -> None:
        """data[layer, cells[t]] = kv[t]. `kv` is `[T, 2 * num_kv_heads * head_dim]`, keys first;
        `cells` is int64 `[T]`, all different."""
        self.data[layer].index_copy_(0, cells, kv)

    def gather(self, layer: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `cells` (int64, any shape S): two views `[*S, num_kv_heads, head_dim]`
        of one fresh copy."""
        rows = self.data[layer].index_select(0, cells.reshape(-1))
        pairs = rows.view(*cells.shape, 2, self.num_kv_heads, self.head_dim)
        return pairs.select(-3, 0), pairs.select(-3, 1)
