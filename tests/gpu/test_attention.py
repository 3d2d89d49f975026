"""Attention over pages against its definition: types, shapes of heads, windows, and lengths."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import AttentionPlan, KVCache, attend, reference

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.real),
]
DECODES = [(130, 1), (0, 1), (7, 1), (63, 1)]
MIXED = [(0, 17), (40, 1), (70, 5), (0, 1), (0, 66)]
PAGE_SIZE, NUM_KV_HEADS = 16, 2


class Case:
    """Rows of (first position, queries), whose pages lie in any order in a cache of random numbers
    that has `num_spare` pages more, before theirs."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        group: int = 4,
        head_dim: int = 64,
        num_spare: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-(first + count) // PAGE_SIZE) for first, count in rows]
        order = torch.randperm(sum(counts), generator=generator) + num_spare
        pages = [page.tolist() for page in order.split(counts)]
        self.plan = AttentionPlan.build(*zip(*rows, strict=True), pages, PAGE_SIZE, device)
        self.cache = KVCache.allocate(
            num_layers=1,
            num_pages=num_spare + sum(counts),
            page_size=PAGE_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        data = self.cache.data[:, num_spare:]
        data.copy_(torch.randn(data.shape, generator=generator).to(dtype))
        shape = (sum(count for _, count in rows), group * NUM_KV_HEADS, head_dim)
        self.q = torch.randn(shape, generator=generator).to(dtype).to(device)

    def error(self, window: int | None = None, sinks: torch.Tensor | None = None) -> float:
        """Returns the root mean square of the difference to the definition, over that of the
        definition. On a device, torch computes the definition there."""
        args = (self.q, self.cache, 0, self.plan)
        options = {"scale": self.cache.head_dim**-0.5, "window": window, "sinks": sinks}
        got, wanted = attend(*args, **options), reference.attend(*args, **options)
        assert got.isfinite().all()
        difference = (got.double() - wanted.double()).square().mean().sqrt()
        return float(difference / wanted.double().square().mean().sqrt())


@pytest.mark.smoke
def test_decodes(device, on_device):
    with on_device():
        assert Case(DECODES, torch.float16, device).error() < TOLERANCES[torch.float16]


@pytest.mark.smoke
def test_a_prompt_is_the_same_bits_in_any_chunks(device, on_device):
    """A block may be whole for the queries of one tile, and have a mask in another."""
    case = Case([(0, 330)], torch.float16, device)
    [pages] = case.plan.page_table.tolist()
    with on_device():
        whole = attend(case.q, case.cache, 0, case.plan, scale=0.1)
        for first, count in [(0, 70), (70, 131), (201, 2), (203, 127)]:
            part = slice(first, first + count)
            plan = AttentionPlan.build([first], [count], [pages], PAGE_SIZE, device)
            assert torch.equal(attend(case.q[part], case.cache, 0, plan, scale=0.1), whole[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_types_and_head_sizes(device, on_device, rows, head_dim, dtype):
    with on_device():
        assert Case(rows, dtype, device, head_dim=head_dim).error() < TOLERANCES[dtype]


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups_and_windows(device, on_device, group, window):
    with on_device():
        case = Case([*DECODES, *MIXED], torch.float32, device, group)
        assert case.error(window) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_sinks(device, on_device, window, dtype):
    with on_device():
        case = Case([*DECODES, *MIXED], dtype, device, group=8)
        sinks = torch.linspace(-4.0, 4.0, 8 * NUM_KV_HEADS, device=device)
        assert case.error(window, sinks) < TOLERANCES[dtype]


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 4096])
def test_long_contexts_beside_short_ones(device, window, dtype):
    rows = [(500 + row, 1) for row in range(40)]
    rows[7], rows[20] = (40_000, 1), (38_000, 300)
    case = Case(rows, dtype, device, head_dim=128)
    assert case.error(window) < TOLERANCES[dtype]


@pytest.mark.real
def test_more_elements_than_32_bits_count(device):
    """The pages in use lie behind 2 ** 31 elements."""
    num_spare = (1 << 31) // (2 * NUM_KV_HEADS * PAGE_SIZE * 128) + 1
    case = Case([*DECODES, (0, 90)], torch.bfloat16, device, head_dim=128, num_spare=num_spare)
    assert case.cache.data.numel() > 1 << 31
    assert case.error() < TOLERANCES[torch.bfloat16]


@pytest.mark.real
def test_a_row_is_the_same_bits_in_any_batch(device):
    """The interpreter shows the same in tests/kernels/attention."""
    rows = [(100 * row, 1) for row in range(60)]
    case = Case(rows, torch.bfloat16, device, head_dim=128)
    together = attend(case.q, case.cache, 0, case.plan, scale=0.1)
    for row in (0, 31, 59):
        first = rows[row][0]
        pages = case.plan.page_table[row, : first // PAGE_SIZE + 1].tolist()
        alone = AttentionPlan.build([first], [1], [pages], PAGE_SIZE, device)
        got = attend(case.q[row : row + 1], case.cache, 0, alone, scale=0.1)
        assert torch.equal(got[0], together[row])
