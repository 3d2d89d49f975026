"""A cache full of random keys and values, with every row's pages scattered over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.attention import AttentionPlan, KVCache

Case = tuple[torch.Tensor, KVCache, AttentionPlan]


@pytest.fixture
def make_sinks() -> Callable[[int], torch.Tensor]:
    """`make_sinks(num_heads)`: of scores' size, some of them larger than most."""

    def make(num_heads: int) -> torch.Tensor:
        return 3 * torch.randn(num_heads, generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture
def extreme_sinks() -> torch.Tensor:
    """float32 [6]: three that leave nothing, and three that change nothing."""
    return torch.tensor([300.0, 1e30, 3.4e38, -300.0, -3.4e38, -torch.inf])


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """`make_case(rows)` with rows of (first position, number of queries) -> (q, cache, plan).

    Cells that belong to no row are NaN: whoever multiplies one, even by zero, shows.
    """

    def make(
        rows: list[tuple[int, int]],
        *,
        page_size: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        is_tiled: bool = False,
        stored: torch.dtype | None = None,
        mutual: Sequence[tuple[int, int]] = (),
    ) -> Case:
        torch.manual_seed(seed)
        contexts = [first + count for first, count in rows]
        counts = [-(-context // page_size) for context in contexts]
        cache = KVCache.allocate(
            num_layers=2,
            num_pages=sum(counts) + 1,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            is_tiled=is_tiled,
            stored=stored,
        )
        if cache.scales is None:
            cache.data.fill_(float("nan"))
        else:
            cache.data.fill_(0x7F)
            cache.scales.fill_(float("nan"))
        pages = torch.randperm(cache.num_pages)[: sum(counts)].split(counts)
        ids = [p.tolist() for p in pages]
        plan = AttentionPlan.build(*zip(*rows, strict=True), ids, page_size, mutual=mutual)
        for context, own in zip(contexts, pages, strict=True):
            positions = torch.arange(context)
            cells = own[positions // page_size] * page_size + positions % page_size
            kv = torch.randn(context, 2 * num_kv_heads * head_dim)
            cache.write(1, cells, kv.to(dtype))
        num_queries = sum(count for _, count in rows)
        # A view into something wider, as the decoder's fused projection gives.
        q = torch.randn(num_queries, num_heads + 3, head_dim)[:, :num_heads].to(dtype)
        return q, cache, plan

    return make
