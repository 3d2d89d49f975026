"""The units that a tower's work for a tile is divided into."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.units import PASS_QUERIES, Share, TowerUnits
from tests.support.examples import examples

TILE = Size(4 * 20, 4 * 20)
"""1,600 patches of 2 x 2 pixels."""


@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    window=st.sampled_from([0, 2, 4]),
    sees_all=st.lists(st.booleans(), min_size=1, max_size=3).map(tuple),
    num_heads=st.integers(1, 6),
    most_pairs=st.one_of(st.none(), st.integers(1, 1 << 20)),
    num_threads=st.integers(1, 9),
)
def test_each_strip_of_each_layer_is_computed_once(
    rows: int,
    columns: int,
    window: int,
    sees_all: tuple[bool, ...],
    num_heads: int,
    most_pairs: int | None,
    num_threads: int,
) -> None:
    """Layer by layer, strip by strip: its shares of attention and then its products, or one unit
    of both."""
    form, tile = TileForm(0, 2, merge=2, window=window), Size(4 * rows, 4 * columns)
    units = TowerUnits(form, sees_all, num_heads, most_pairs, num_threads)
    num_shares, strips = len(units.shares(tile)), form.strips(tile)
    wanted = []
    for layer, is_divided in enumerate((False, *sees_all)):
        count = num_shares + 1 if is_divided and num_shares > 1 else 1
        wanted += [(layer, *each, count) for each in product(range(len(strips)), range(count))]
    found = [units.find(tile, index) for index in range(units.count(tile))]
    assert found == wanted
    with pytest.raises(IndexError):
        units.find(tile, len(found))
    for unit in found:
        is_share = unit.num_units > 1 and unit.place < num_shares
        assert unit.num_shares == (num_shares - unit.place if is_share else 0)


def test_shares_of_attention_are_all_of_it() -> None:
    """Each head of each query once, also of a strip that is smaller than the largest."""
    form = TileForm(0, 2, merge=2, window=4)
    tile = Size(4 * 22, 4 * 21)
    sizes = sorted({end - start for start, end in form.strips(tile)})
    for most_pairs in (1, 5_000, 50_000, 100_000, 1 << 40):
        found = TowerUnits(form, (True,), 5, most_pairs)
        for size in sizes:
            done = [
                (query, head)
                for share in found.shares(tile)
                for own in (share.within(size),)
                for query in range(own.first, own.end)
                for head in range(own.first_head, own.end_head)
            ]
            assert sorted(done) == list(product(range(size), range(5)))


@pytest.mark.parametrize("most_pairs", [1, 20_000, 50_000, 1 << 40])
def test_shares_are_joined_as_far_as_they_are_one(most_pairs: int) -> None:
    """Joined shares have the heads and queries of the single ones, and no more would be one."""
    units = TowerUnits(TileForm(0, 2, merge=2, window=4), (True,), 5, most_pairs)
    tile = Size(4 * 22, 4 * 21)
    shares = units.shares(tile)

    def covered(own: Iterable[Share]) -> set[tuple[int, int]]:
        """Queries and heads."""
        return {cell for each in own for cell in product(range(*each[:2]), range(*each[2:]))}

    for first, end in combinations(range(len(shares) + 1), 2):
        found, number = units.joined(tile, first, end - first)
        assert covered([found]) == covered(shares[first : first + number])
        for longer in range(first + number + 1, end + 1):
            own = covered(shares[first:longer])
            sides = (len(set(side)) for side in zip(*own, strict=True))
            assert len(own) < prod(sides)
    assert units.joined(tile, 0, len(shares)) == (Share(0, shares[-1].end, 0, 5), len(shares))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 20, 64])
def test_a_share_has_work_for_each_thread(num_threads: int) -> None:
    """Or is the whole; work is a few queries of a head."""
    tile = TILE
    for num_heads in (1, 5, 16):
        units = TowerUnits(TileForm(0, 2), (True,), num_heads, 1, num_threads)
        shares = units.shares(tile)
        whole = Share(0, 32, 0, num_heads)
        assert sum(each.num_queries for each in shares) == whole.num_queries
        for each in shares:
            num_passes = -(-(each.end - each.first) // PASS_QUERIES) * (
                each.end_head - each.first_head
            )
            assert num_passes >= num_threads or shares == (whole,)


def test_a_device_divides_no_attention() -> None:
    units = TowerUnits(TileForm(0, 2, merge=2, window=4), (False, True), 3, None)
    assert units.per_strip(TILE) == (1, 1, 1)
