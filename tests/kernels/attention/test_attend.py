"""The fast path agrees with the definition, and the definition with dense attention."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import FP8, KVCache, attend, cpu, page_bytes, reference

pytestmark = pytest.mark.matrix

WORKLOADS = {
    "decode-one": [(0, 1)],
    "decode-equal": [(16, 1)] * 5,
    "decode-near": [(20, 1), (17, 1), (19, 1), (22, 1)],
    "decode-far-apart": [(0, 1), (130, 1), (7, 1), (64, 1), (131, 1), (1, 1)],
    "prompt": [(0, 13)],
    "prompts": [(0, 5), (0, 2), (0, 64)],
    "chunk": [(9, 7)],
    "chunks-of-one-and-more": [(30, 1), (4, 2), (0, 33), (63, 1), (1, 3)],
    "mixed": [(0, 17), (40, 1), (12, 5), (41, 1), (0, 1), (8, 8)],
}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("window", [None, 1, 6, 16, 1000])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_attend(make_case, assert_close, workload, window):
    q, cache, plan = make_case(WORKLOADS[workload])
    wanted = reference.attend(q, cache, 1, plan, scale=0.3, window=window)
    got = attend(q, cache, 1, plan, scale=0.3, window=window)
    assert_close("out", wanted, got, TOLERANCES[q.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    [(1, 1, 2, 1), (3, 3, 10, 3), (6, 2, 16, 5), (8, 1, 64, 16), (7, 7, 80, 64)],
)
def test_attend_shapes(
    make_case, assert_close, num_heads, num_kv_heads, head_dim, page_size, dtype
):
    q, cache, plan = make_case(
        WORKLOADS["mixed"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    for window in (None, 9):
        wanted = reference.attend(q, cache, 1, plan, scale=head_dim**-0.5, window=window)
        got = attend(q, cache, 1, plan, scale=head_dim**-0.5, window=window)
        assert_close(f"window {window}", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize("window", [None, 7])
def test_reference_is_dense_attention(make_case, assert_close, window):
    """Against the formula over one whole sequence, with an explicit mask."""
    q, cache, plan = make_case([(0, 21)], page_size=4)
    cells = plan.cells
    k, v = (part.repeat_interleave(2, dim=1) for part in cache.gather(1, cells))
    distance = torch.arange(21)[:, None] - torch.arange(21)[None, :]
    visible = (distance >= 0) & (distance < (window or 21))
    scores = 0.5 * torch.einsum("qhd,khd->hqk", q, k)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v)
    assert_close("out", wanted, reference.attend(q, cache, 1, plan, scale=0.5, window=window), 1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 7])
def test_reference_has_one_more_score(make_case, make_sinks, assert_close, window, softcap):
    """Against the formula over one whole sequence, whose sinks are a last column."""
    q, cache, plan = make_case([(0, 21)], page_size=4)
    k, v = (part.repeat_interleave(2, dim=1) for part in cache.gather(1, plan.cells))
    distance = torch.arange(21)[:, None] - torch.arange(21)[None, :]
    visible = (distance >= 0) & (distance < (window or 21))
    scores = 0.5 * torch.einsum("qhd,khd->hqk", q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sinks = make_sinks(4)
    scores = scores.masked_fill(~visible, float("-inf"))
    columns = torch.cat((scores, sinks.view(4, 1, 1).expand(4, 21, 1)), dim=-1)
    wanted = torch.einsum("hqk,khd->qhd", columns.softmax(-1)[..., :-1], v)
    options = {"scale": 0.5, "window": window, "softcap": softcap, "sinks": sinks}
    assert_close("out", wanted, reference.attend(q, cache, 1, plan, **options), 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 2.0), (16, 2.0)])
@pytest.mark.parametrize("workload", ["decode-far-apart", "prompts", "mixed"])
def test_sinks(make_case, make_sinks, assert_close, workload, window, softcap, dtype):
    q, cache, plan = make_case(WORKLOADS[workload], num_heads=6, dtype=dtype)
    options = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": make_sinks(6)}
    wanted = reference.attend(q, cache, 1, plan, **options)
    assert_close("out", wanted, attend(q, cache, 1, plan, **options), TOLERANCES[dtype])


@pytest.mark.parametrize("compute", [attend, reference.attend])
def test_extreme_sinks(make_case, extreme_sinks, assert_close, compute):
    q, cache, plan = make_case(WORKLOADS["mixed"], num_heads=6)
    wanted = reference.attend(q, cache, 1, plan, scale=0.3)
    got = compute(q, cache, 1, plan, scale=0.3, sinks=extreme_sinks)
    assert not (got[:, :3].abs() > 1e-30).any()
    assert_close("out", wanted[:, 3:], got[:, 3:], TOLERANCES[q.dtype])


def test_a_row_is_the_same_beside_any_other(make_case, assert_close):
    """The second case holds the first one's rows, with the same contents, and others."""
    rows = [(37, 1), (0, 9), (5, 6)]
    q, cache, plan = make_case(rows)
    alone = attend(q, cache, 1, plan, scale=0.3)
    more = [*rows, (90, 1), (30, 1), (0, 20)]
    crowd_q, crowd_cache, crowd = make_case(more, seed=1)
    for row, (first, count) in enumerate(rows):
        for position in range(first + count):
            cells = [
                int(p.page_table[row, position // 4]) * 4 + position % 4 for p in (plan, crowd)
            ]
            kv = torch.stack(cache.gather(1, torch.tensor(cells[:1])), dim=1).flatten(1)
            crowd_cache.write(1, torch.tensor(cells[1:]), kv)
    crowd_q[: len(q)] = q
    together = attend(crowd_q, crowd_cache, 1, crowd, scale=0.3)
    assert_close("rows", alone, together[: len(q)], 1e-6)


def test_a_poisoned_row_poisons_only_itself(make_case):
    """One row's values overflowed: the rows padded to its length stay finite."""
    q, cache, plan = make_case([(30, 1), (28, 1), (29, 1)])
    cache.write(1, plan.cells[:1], torch.full((1, 2 * 2 * 8), float("inf")))
    out = attend(q, cache, 1, plan, scale=0.3)
    assert not out[0].isfinite().all()
    assert out[1:].isfinite().all()


def test_only_the_asked_layer_is_read(make_case):
    q, cache, plan = make_case([(3, 1), (0, 4)])
    assert cache.data[0].isnan().all()
    assert attend(q, cache, 0, plan, scale=1.0).isnan().all()
    assert attend(q, cache, 1, plan, scale=1.0).isfinite().all()


def test_groups_keep_padding_and_copies_small(make_case, monkeypatch):
    monkeypatch.setattr(cpu, "MAX_GROUP_CELLS", 300)
    rows = [(int(length), 1) for length in torch.randint(1, 200, (40,), generator=_generator())]
    q, _, plan = make_case(rows)
    groups = cpu.make_schedule(plan, None, q.dtype).groups
    tokens = [torch.arange(len(q))[group.tokens] for group in groups]
    assert torch.cat(tokens).sort().values.tolist() == list(range(len(rows)))
    for group, members in zip(groups, tokens, strict=True):
        num_cells = int(plan.context_lengths[members].sum())
        assert num_cells >= (1 - cpu.MAX_PADDED_SHARE) * group.cells.numel()
        assert group.cells.numel() <= 300 or len(members) == 1


def test_a_window_reads_only_what_it_sees(make_case):
    q, _, plan = make_case([(100, 1), (99, 1), (50, 20)])
    schedule = cpu.make_schedule(plan, 8, q.dtype)
    assert [tuple(group.cells.shape) for group in schedule.groups] == [(2, 8)]
    assert [len(chunk.cells) for chunk in schedule.chunks] == [8 + 19]


def test_page_bytes_is_what_the_cache_takes():
    shape = {"num_layers": 3, "page_size": 5, "num_kv_heads": 2, "head_dim": 6}
    for dtype, stored in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
    ):
        cache = KVCache.allocate(num_pages=7, dtype=dtype, stored=stored, **shape)
        assert cache.num_pages == 7
        assert cache.num_bytes == 7 * page_bytes(stored=stored, **shape)
        assert cache.num_bytes == cache.data.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "is_tiled"),
    [
        (torch.float32, 2, 3, False),
        (torch.bfloat16, 16, 16, False),
        (torch.float32, 16, 32, True),
        (torch.bfloat16, 32, 48, True),
    ],
)
def test_write_then_gather(dtype, page_size, head_dim, is_tiled):
    cache = KVCache.allocate(
        num_layers=2,
        num_pages=3,
        page_size=page_size,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        is_tiled=is_tiled,
    )
    kv = torch.randn(3, 2 * 2 * head_dim).to(dtype)
    cells = torch.tensor([2 * page_size, 0, 2 * page_size - 1])
    cache.write(1, cells, kv)
    k, v = cache.gather(1, cells[[1, 0, 2, 1]].view(2, 2))
    wanted = kv[[1, 0, 2, 1]].view(2, 2, 2, 2, head_dim)
    assert torch.equal(k, wanted[:, :, 0])
    assert torch.equal(v, wanted[:, :, 1])
    assert not cache.data[0].any()
    assert cache.data.count_nonzero() == kv.count_nonzero(), "another cell was written"


def test_a_tile_holds_pairs_of_keys_and_of_values():
    cache = KVCache.allocate(
        num_layers=1,
        num_pages=2,
        page_size=16,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        is_tiled=True,
    )
    kv = torch.randn(1, 2 * 2 * 16).to(torch.bfloat16)
    cache.write(0, torch.tensor([16 + 5]), kv)
    k, v = kv.view(2, 2, 16)
    tiles = cache.data[0, 1].view(2, 2, 256)  # [num_kv_heads, keys and values, elements]
    for head, dim in ((0, 0), (1, 7), (1, 14)):
        assert tiles[head, 0].view(8, 16, 2)[dim // 2, 5, dim % 2] == k[head, dim]
        assert tiles[head, 1].view(8, 16, 2)[5 // 2, dim, 5 % 2] == v[head, dim]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
