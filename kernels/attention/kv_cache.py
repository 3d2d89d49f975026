"""The memory of keys and values.

A page holds `page_size` neighbouring positions of one sequence; cell c of page p is number
`p * page_size + c`. In each layer a page lies in one piece per key head, its keys and then its
values, so that a thread that computes a key head reads a page of it in one stream. Inside, two
layouts:

- in rows: keys `[page_size, head_dim]`, values `[page_size, head_dim]`;
- tiled, for the CPU kernels in C++: keys `[head_dim / P, page_size, P]`, values
  `[page_size / P, head_dim, P]`, with P = 2 in bf16 (what one instruction multiplies and adds up)
  and 1 in fp32. A vector load then has one element, or pair, of 16 keys, and 16 dimensions of one
  value or of a pair: both products of attention run without a sum across a vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.host_memory import allocate_host

TILE_CELLS = 16
"""Cells of one tile of the CPU kernels: page_size and head_dim of a tiled cache are multiples."""


def page_bytes(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Returns the bytes of one page, over all layers."""
    return num_layers * page_size * 2 * num_kv_heads * head_dim * dtype.itemsize


def can_tile(page_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether a cache of this shape can be tiled."""
    is_whole = page_size % TILE_CELLS == 0 and head_dim % TILE_CELLS == 0
    return is_whole and dtype in (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class KVCache:
    """`data` is `[num_layers, num_pages, num_kv_heads, 2 (keys, values), page_size * head_dim]`.

    Every page is usable; a cell's content is meaningless until it is written.
    """

    data: Tensor
    page_size: int
    head_dim: int
    is_tiled: bool = False

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
        is_tiled: bool = False,
    ) -> KVCache:
        """Creates an empty cache. `is_tiled` needs a shape that `can_tile` accepts."""
        assert not is_tiled or can_tile(page_size, head_dim, dtype), (page_size, head_dim, dtype)
        shape = (num_layers, num_pages, num_kv_heads, 2, page_size * head_dim)
        if torch.device(device).type == "cpu":
            data = allocate_host(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            data = torch.zeros(shape, dtype=dtype, device=device)
        return cls(data, page_size, head_dim, is_tiled)

    @property
    def num_pages(self) -> int:
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, cells: Tensor, kv: Tensor) -> None:
        """Writes `kv[t]` to cell `cells[t]`.

        Args:
            layer: Index of the layer.
            cells: int64 `[T]`, all different.
            kv: `[T, 2 * num_kv_heads * head_dim]` of the cache's dtype, keys first.
        """
        pairs = kv.view(len(kv), 2, self.num_kv_heads, self.head_dim)
        if not self.is_tiled:
            vectors = pairs.reshape(-1, self.head_dim)
            self._vectors(layer).index_copy_(0, self._vector_numbers(cells).flatten(), vectors)
            return
        k, v = pairs.unbind(1)
        pages, offsets = cells // self.page_size, cells % self.page_size
        keys, values = self._tiles(layer)
        keys[pages, offsets] = k.unflatten(-1, (-1, keys.shape[-1]))
        share = values.shape[2]
        values[pages, offsets // share, offsets % share] = v

    def gather(self, layer: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Reads cells into new memory.

        Args:
            layer: Index of the layer.
            cells: int64 of any shape S.

        Returns:
            Keys and values, `[*S, num_kv_heads, head_dim]` both, of the cache's dtype, with unit
            stride in the last dimension.
        """
        if not self.is_tiled:
            numbers = self._vector_numbers(cells)
            vectors = self._vectors(layer).index_select(0, numbers.flatten())
            pairs = vectors.view(*numbers.shape, self.head_dim)
            return pairs.select(-3, 0), pairs.select(-3, 1)
        pages, offsets = cells // self.page_size, cells % self.page_size
        keys, values = self._tiles(layer)
        share = values.shape[2]
        k = keys[pages, offsets].flatten(-2)
        return k, values[pages, offsets // share, offsets % share].contiguous()

    def _vectors(self, layer: int) -> Tensor:
        """In rows: every vector of the layer, `[number of them, head_dim]`."""
        return self.data[layer].view(-1, self.head_dim)

    def _vector_numbers(self, cells: Tensor) -> Tensor:
        """`[*S, 2, num_kv_heads]`: where the keys and the values of each head of `cells` lie."""
        heads = torch.arange(self.num_kv_heads, device=cells.device) * (2 * self.page_size)
        sides = torch.arange(2, device=cells.device)[:, None] * self.page_size
        page_vectors = self.num_kv_heads * 2 * self.page_size
        starts = cells // self.page_size * page_vectors + cells % self.page_size
        return starts[..., None, None] + (sides + heads)

    def _tiles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Tiled: keys `[num_pages, page_size, num_kv_heads, head_dim / P, P]` and values
        `[num_pages, page_size / P, P, num_kv_heads, head_dim]`, views of the layer."""
        pair = 2 if self.data.dtype == torch.bfloat16 else 1
        keys, values = self.data[layer].unbind(2)
        keys = keys.unflatten(-1, (self.head_dim // pair, self.page_size, pair))
        values = values.unflatten(-1, (self.page_size // pair, self.head_dim, pair))
        return keys.permute(0, 3, 1, 2, 4), values.permute(0, 2, 4, 1, 3)
