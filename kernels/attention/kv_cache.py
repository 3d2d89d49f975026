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

A cache may hold its vectors in FP8, as codes of one byte with a scale for each vector. After the
codes of a key head's keys and values come their scales, float32 `[2, page_size]`: a vector load has
the scales of 16 neighbours, in rows and in tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.host_memory import allocate_host

TILE_CELLS = 16
"""Cells of one tile of the CPU kernels: page_size and head_dim of a tiled cache are multiples."""
FP8 = torch.float8_e4m3fn
"""Four bits of exponent, three of mantissa, without infinities: https://arxiv.org/abs/2209.05433"""
LARGEST_FP8 = 448.0
SCALE_BYTES = 4
"""The size of the scale of a vector in FP8."""
_TINY = torch.finfo(torch.float32).tiny


def page_bytes(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, stored: torch.dtype
) -> int:
    """Returns the bytes of one page, over all layers, whose elements are held as `stored`."""
    vector_bytes = head_dim * stored.itemsize + (SCALE_BYTES if stored == FP8 else 0)
    return num_layers * page_size * 2 * num_kv_heads * vector_bytes


def can_tile(page_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether a cache of this shape can be tiled."""
    is_whole = page_size % TILE_CELLS == 0 and head_dim % TILE_CELLS == 0
    return is_whole and dtype in (torch.float32, torch.bfloat16)


def to_fp8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds vectors `[..., head_dim]` to FP8, to the nearest and ties to even.

    A vector's scale is its largest magnitude by the largest of FP8, so that its bits depend on no
    other vector. That of a vector with NaN or an infinity is neither a number nor finite.

    Returns:
        Codes, uint8, shaped as `vectors`, and scales, float32 `[...]`.
    """
    wide = vectors.float()
    scales = (wide.abs().amax(-1) / LARGEST_FP8).clamp_(min=_TINY)
    rounded = (wide / scales[..., None]).clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    return rounded.view(torch.uint8), scales


@dataclass(frozen=True, slots=True)
class KVCache:
    """`data` is `[num_layers, num_pages, num_kv_heads, 2 (keys, values), page_size * head_dim]`, of
    `dtype`, in which attention computes, or codes of FP8, uint8. `scales`, float32 `[num_layers,
    num_pages, num_kv_heads, 2, page_size]`, are those of FP8; None: there are none. Both are views
    of one memory.

    Every page is usable; a cell's content is meaningless until it is written.
    """

    data: Tensor
    page_size: int
    head_dim: int
    dtype: torch.dtype
    is_tiled: bool = False
    scales: Tensor | None = None

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
        stored: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        is_tiled: bool = False,
    ) -> KVCache:
        """Creates an empty cache for attention in `dtype`. `stored` is `dtype` (None), or FP8,
        whose head_dim is even. `is_tiled` needs a shape that `can_tile` accepts."""
        assert not is_tiled or can_tile(page_size, head_dim, dtype), (page_size, head_dim, dtype)
        stored = stored or dtype
        assert stored in (dtype, FP8)
        assert stored != FP8 or head_dim % 2 == 0, "scales lie on whole words"
        side_size = page_size * head_dim
        of_layer = page_bytes(
            num_layers=1,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            stored=stored,
        )
        shape = (num_layers, num_pages, num_kv_heads, of_layer // num_kv_heads)
        if torch.device(device).type == "cpu":
            memory = allocate_host(math.prod(shape)).view(shape)
        else:
            memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        code_bytes = 2 * side_size * stored.itemsize
        elements = torch.uint8 if stored == FP8 else dtype
        data = memory[..., :code_bytes].view(elements).unflatten(-1, (2, side_size))
        scales = None
        if stored == FP8:
            scales = memory[..., code_bytes:].view(torch.float32).unflatten(-1, (2, page_size))
        return cls(data, page_size, head_dim, dtype, is_tiled, scales)

    @property
    def num_pages(self) -> int:
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def head_bytes(self) -> int:
        """The distance of a page's key heads, and with their number that of pages."""
        return self.num_bytes // math.prod(self.data.shape[:3])

    @property
    def num_bytes(self) -> int:
        scale_bytes = 0 if self.scales is None else self.scales.nbytes
        return self.data.nbytes + scale_bytes

    def scales_of(self, layer: int) -> Tensor | None:
        """Returns a layer of `scales`, fp32, without its first dimension [layers]; None without
        scales."""
        return None if self.scales is None else self.scales[layer]

    def write(self, layer: int, cells: Tensor, kv: Tensor) -> None:
        """Writes `kv[t]` to cell `cells[t]`.

        Args:
            layer: Index of the layer.
            cells: int64 `[T]`, all different.
            kv: `[T, 2 * num_kv_heads * head_dim]` of the cache's dtype, keys first.
        """
        pairs = kv.view(len(kv), 2, self.num_kv_heads, self.head_dim)
        if self.scales is None and not self.is_tiled:
            vectors = pairs.reshape(-1, self.head_dim)
            self._vectors(layer).index_copy_(0, self._vector_numbers(cells).flatten(), vectors)
            return
        pages, offsets = cells // self.page_size, cells % self.page_size
        if self.scales is not None:
            pairs, scales = to_fp8(pairs)
            self.scales[layer].permute(0, 3, 2, 1)[pages, offsets] = scales
        if not self.is_tiled:
            self._rows(layer)[pages, offsets] = pairs
            return
        k, v = pairs.unbind(1)
        keys, values = self._tiles(layer)
        keys[pages, offsets] = k.unflatten(-1, (-1, keys.shape[-1]))
        share = values.shape[2]
        values[pages, offsets // share, offsets % share] = v

    def gather(
        self, layer: int, cells: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reads cells into new memory.

        Args:
            layer: Index of the layer.
            cells: int64 of any shape S.
            dtype: The dtype of the result; None: the cache's. Scales multiply in fp32 before.

        Returns:
            Keys and values, `[*S, num_kv_heads, head_dim]` both, with unit stride in the last
            dimension.
        """
        dtype = dtype or self.dtype
        if self.scales is None and not self.is_tiled:
            numbers = self._vector_numbers(cells)
            vectors = self._vectors(layer).index_select(0, numbers.flatten()).to(dtype)
            pairs = vectors.view(*numbers.shape, self.head_dim)
            return pairs.select(-3, 0), pairs.select(-3, 1)
        pages, offsets = cells // self.page_size, cells % self.page_size
        if self.is_tiled:
            keys, values = self._tiles(layer)
            share = values.shape[2]
            k = keys[pages, offsets].flatten(-2)
            v = values[pages, offsets // share, offsets % share].contiguous()
        else:
            pairs = self._rows(layer)[pages, offsets]
            k, v = pairs.select(-3, 0), pairs.select(-3, 1)
        if self.scales is None:
            return k.to(dtype), v.to(dtype)
        scales = self.scales[layer].permute(0, 3, 2, 1)[pages, offsets]
        k, v = (
            (side.view(FP8).float() * scales.select(-2, i)[..., None]).to(dtype)
            for i, side in enumerate((k, v))
        )
        return k, v

    def _vectors(self, layer: int) -> Tensor:
        """In rows, not FP8: every vector of the layer, `[number of them, head_dim]`."""
        return self.data[layer].view(-1, self.head_dim)

    def _vector_numbers(self, cells: Tensor) -> Tensor:
        """`[*S, 2, num_kv_heads]`: where the keys and the values of each head of `cells` lie."""
        heads = torch.arange(self.num_kv_heads, device=cells.device) * (2 * self.page_size)
        sides = torch.arange(2, device=cells.device)[:, None] * self.page_size
        page_vectors = self.num_kv_heads * 2 * self.page_size
        starts = cells // self.page_size * page_vectors + cells % self.page_size
        return starts[..., None, None] + (sides + heads)

    def _rows(self, layer: int) -> Tensor:
        """In rows, FP8: `[num_pages, page_size, 2, num_kv_heads, head_dim]`, a view."""
        vectors = self.data[layer].unflatten(-1, (self.page_size, self.head_dim))
        return vectors.permute(0, 3, 2, 1, 4)

    def _tiles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Tiled: keys `[num_pages, page_size, num_kv_heads, head_dim / P, P]` and values
        `[num_pages, page_size / P, P, num_kv_heads, head_dim]`, views of the layer."""
        pair = 2 if self.dtype == torch.bfloat16 else 1
        keys, values = self.data[layer].unbind(2)
        keys = keys.unflatten(-1, (self.head_dim // pair, self.page_size, pair))
        values = values.unflatten(-1, (self.page_size // pair, self.head_dim, pair))
        return keys.permute(0, 3, 1, 2, 4), values.permute(0, 2, 4, 1, 3)
