"""The result of attention in C++ to the bit: the weights that scores get, and the cells that
nobody sees."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from kernels.attention import FP8, AttentionPlan, KVCache, native

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
LOG2_E = 1.44269504
POWERS = 2.0**60
"""The size of values by which weights are read off: a weight of 2^-126 leaves a normal number."""


def values_cache(scores: torch.Tensor, value: float, dtype: torch.dtype) -> KVCache:
    """A cache of one sequence, in order, whose keys have these scores with a query of ones in the
    first three dimensions, and whose cell i has its `value` in dimension i."""
    num_cells = len(scores)
    cache = KVCache.allocate(
        num_layers=1,
        num_pages=num_cells // 16,
        page_size=16,
        num_kv_heads=1,
        head_dim=num_cells,
        dtype=dtype,
        is_tiled=True,
    )
    keys, rest = torch.zeros(num_cells, num_cells), scores.float()
    for dimension in range(3):  # a float is the sum of three in bf16
        keys[:, dimension] = rest.bfloat16()
        rest = torch.where(rest.isfinite(), rest - keys[:, dimension], 0.0)
    vectors = torch.cat((keys, torch.eye(num_cells) * value), dim=1)
    cache.write(0, torch.arange(num_cells), vectors.to(dtype))
    return cache


def attend_once(library, cache: KVCache, num_cells: int) -> torch.Tensor:
    """Returns the output of one query whose scores are powers of two as the keys have them."""
    q = torch.zeros(1, 1, cache.head_dim, dtype=cache.dtype)
    q[..., :3] = 1
    pages = [list(range(cache.num_pages))]
    plan = AttentionPlan.build([num_cells - 1], [1], pages, cache.page_size)
    return native.attend(q, cache, 0, plan, scale=1 / LOG2_E, library=library)[0, 0]


@pytest.mark.parametrize(
    ("dtype", "least", "most_error", "mean_error"),
    [
        # Powers below -125.5 are rounded to -126, and give 0.
        (torch.float32, -125.4, 1e-6, 1e-6),
        # Where two numbers are about equally near, the other one may be chosen.
        (torch.bfloat16, -125.98, 2**-7, 5e-4),
    ],
)
def test_weights_are_powers_of_two(library, dtype, least, most_error, mean_error):
    """Relative to the largest score's, which comes first; also just above the least power."""
    parts = ((0, 0, 1), (-1, -0.01, 63), (-124, least, 96), (-60, -1, 32))
    scores = torch.cat([torch.linspace(*part) for part in parts])
    got = attend_once(library, values_cache(scores, POWERS, dtype), len(scores))
    weights = torch.exp2(scores.double())
    wanted = (weights.to(dtype).double() * POWERS / weights.sum()).to(dtype)
    errors = got.double() / wanted.double() - 1
    wrong = (errors.abs() > most_error).nonzero().flatten()
    assert not len(wrong), scores[wrong].tolist()
    assert errors.square().mean().sqrt() <= mean_error


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_below_the_largest_count_nothing(library, dtype):
    """No value is so large that it shows, and the first one's bits stay."""
    far = [-127.1, -127.5, -128.0, -149.0, -300.0, -1e4, -1e30, -3e38, -math.inf]
    scores = torch.tensor([0.0, *far, *torch.linspace(-127, -200, 86).tolist()])
    cache = values_cache(scores - 3, 3e38, dtype)
    got = attend_once(library, cache, len(scores))
    assert not got[1:].any(), scores[got.nonzero().flatten()].tolist()
    assert torch.equal(got[:1], torch.full((1,), 3e38).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_query_that_sees_one_cell_gets_its_value(library, make_case, is_tiled, dtype):
    """To the bit, whatever its score is; and half of it beside a sink that is as large, because the
    weight of the largest score is 1."""
    q, cache, plan = make_case(
        [(0, 1)] * 40, head_dim=48, page_size=16, dtype=dtype, is_tiled=is_tiled
    )
    q *= torch.logspace(-3, 3, 40)[:, None, None].to(dtype)
    _, values = cache.gather(1, plan.cells)
    got = native.attend(q, cache, 1, plan, scale=0.3, library=library)
    values = values.repeat_interleave(2, dim=1)
    assert torch.equal(got, values)
    options = {"scale": 0.3, "sinks": torch.zeros(4), "library": library}
    got = native.attend(torch.zeros_like(q), cache, 1, plan, **options)
    assert torch.equal(got, values / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_nan_in_a_key_that_is_seen_is_in_the_result(library, make_case, is_tiled, dtype):
    """Of its key head alone, wherever it is: of each row in another cell."""
    num_cells = 70
    q, cache, plan = make_case(
        [(num_cells - 1, 1)] * num_cells,
        head_dim=32,
        page_size=16,
        dtype=dtype,
        is_tiled=is_tiled,
    )
    places = torch.arange(num_cells)
    cells = plan.page_table[places, places // 16] * 16 + places % 16
    keys, values = cache.gather(1, cells)
    for sign in (1, -1):
        keys[places, 0, places % 32] = math.copysign(math.nan, sign)
        cache.write(1, cells, torch.cat((keys.flatten(1), values.flatten(1)), dim=1))
        out = native.attend(q, cache, 1, plan, scale=0.3, library=library)
        lost = [cell for cell in range(num_cells) if not out[cell, :2].isnan().all()]
        assert not lost, f"sign {sign}: {lost}"
        assert out[:, 2:].isfinite().all()


def cells_of(pages: list[int], end: int) -> torch.Tensor:
    """Returns the cells, in pages of 16, of the first `end` positions."""
    positions = torch.arange(end)
    return torch.tensor(pages)[positions // 16] * 16 + positions % 16


def signed(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Returns numbers of many sizes whose sum over the first dimension is 0."""
    half = torch.randn(shape, generator=generator) * torch.exp2(
        4 * torch.randn(shape, generator=generator)
    )
    return torch.cat((half, -half))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("sums", "window"), [("values", 50), ("values", 550), ("scores", None)])
def test_no_sum_depends_on_the_chunk(library, make_case, sums, window, head_dim, dtype):
    """These cancel, and so are rounding errors, which another order of terms would change: of all
    values in a window, with scores that are 0, or of the products that are a score."""
    q, cache, plan = make_case(
        [(0, 600)], head_dim=head_dim, page_size=16, dtype=dtype, is_tiled=True
    )
    generator, pages = torch.Generator().manual_seed(1), plan.page_table[0].tolist()
    scale, values = 1.0, torch.randn(600, 2, head_dim, generator=generator)
    keys = torch.zeros(600, 2, head_dim)
    if sums == "values":
        values = signed(generator, 25, 2, head_dim).repeat(12, 1, 1)
    else:
        scale, order = 2.0**18, torch.randperm(head_dim, generator=generator)
        keys = signed(generator, head_dim // 2, 600, 2)[order].permute(1, 2, 0)
        q = q[..., : head_dim // 2].repeat(1, 1, 2)[..., order]
    kv = torch.stack((keys, values), dim=1).flatten(1).to(dtype)
    cache.write(1, cells_of(pages, 600), kv)
    options = {"scale": scale, "window": window, "library": library}
    whole = native.attend(q, cache, 1, plan, **options)
    assert len(whole.unique()) > 1000
    for start, end in ((0, 33), (33, 34), (34, 100), (250, 255), (513, 600), (599, 600)):
        chunk = AttentionPlan.build([start], [end - start], [pages], 16)
        got = native.attend(q[start:end], cache, 1, chunk, **options)
        assert torch.equal(got, whole[start:end]), f"{start} .. {end}"


def attend_from(
    library, start: int, q: torch.Tensor, cache: KVCache, pages: list[int], first: int
) -> torch.Tensor:
    """Attends from queries at `first` and behind it, of which the first one's window begins at
    `start`."""
    plan = AttentionPlan.build([first], [len(q)], [pages], cache.page_size)
    window = first + 1 - start
    return native.attend(q, cache, 1, plan, scale=0.3, window=window, library=library)


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, FP8)]
)
def test_pages_below_the_window_may_hold_anything(library, make_case, dtype, stored):
    """Their numbers are another sequence's by now, or of nobody's. Windows begin at even and odd
    tiles, of which one product takes two, and within them."""
    differ = []
    for (first, count), start in product(
        ((130, 1), (130, 7), (130, 45), (700, 1)), (16, 32, 40, 48, 80, 112, 115)
    ):
        # The pages of the second row are those of others.
        q, cache, plan = make_case(
            [(first, count), (900, 1)],
            head_dim=32,
            page_size=16,
            dtype=dtype,
            is_tiled=True,
            stored=stored,
        )
        start += first // 512 * 512  # in a later part, too
        own, others = (row.tolist() for row in plan.page_table)
        own, below = own[: -(-(first + count) // 16)], start // 16
        [unused] = {*range(cache.num_pages)} - {*own, *others}
        pages_below = {
            "another's": others[:below],
            "nobody's, NaN": [unused] * below,
            "the last": [cache.num_pages - 1] * below,
            "its own, all NaN to the window": own[:below],
        }
        wanted = attend_from(library, start, q[:count], cache, own, first)
        for name, pages in pages_below.items():
            if name.startswith("its own"):
                poison = torch.full((start, 2 * 2 * 32), math.nan, dtype=dtype)
                cache.write(1, cells_of(own, start), poison)
            pages = [*pages, *own[below:]]
            got = attend_from(library, start, q[:count], cache, pages, first)
            if not torch.equal(got, wanted):
                differ.append(f"{count} from {first}, window from {start}: {name}")
    assert not differ
