"""The units that a tower's work for a tile is divided into."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from inference_svc.pictures.sizes import Size, TileForm

SHARE_PAIRS = 1 << 19
"""The products of queries with keys of a share of attention, at most about: as many as a strip of
a tile of 1,024 patches has in 16 heads. In towers of 1,024 to 1,280 elements they take less than
half the time of the strip's other products, however many threads share both, so that the longest
unit of a large tile is these products, or what a tile of 1,024 patches has."""
PASS_QUERIES = 16
"""The queries that pass over the keys at once, as an item of a thread's work. With AMX fewer take
as long; other processors compute some of them at a time, and a share could have fewer."""


class Share(NamedTuple):
    """A share of a strip's attention: queries [first, end), counted from the strip's first token,
    and heads [first_head, end_head)."""

    first: int
    end: int
    first_head: int
    end_head: int

    @property
    def num_queries(self) -> int:
        """The queries of all its heads."""
        return (self.end - self.first) * (self.end_head - self.first_head)

    def within(self, num_queries: int) -> Share:
        """Returns the share of a strip of so many queries: none, if it has fewer."""
        return self._replace(first=min(self.first, num_queries), end=min(self.end, num_queries))


class Unit(NamedTuple):
    """A unit of a strip of a tile in a layer, at `place` of `num_units`. If there are several, the
    last one is the products up to the next layer's attention, and the others are shares of
    attention. Layer 0 is the work before the first attention."""

    layer: int
    strip: int
    place: int
    num_units: int

    @property
    def num_shares(self) -> int:
        """The shares of attention, from this one on, that are units without products."""
        return self.num_units - 1 - self.place


class TowerUnits(NamedTuple):
    """The units of a tower of `tiles`: layer by layer, strip by strip. `sees_all` says of each
    layer whether its patches see all of a tile. Then the attention of a strip, of `num_heads`, is
    divided into shares of up to `most_pairs` queries times keys: a large tile's would take too long
    beside the tokens of texts. None: it is not. A share has a pass of PASS_QUERIES of a head for
    each of `num_threads` at least, so of the largest tiles it may have more pairs."""

    tiles: TileForm
    sees_all: tuple[bool, ...]
    num_heads: int
    most_pairs: int | None
    num_threads: int = 1

    def shares(self, tile: Size) -> tuple[Share, ...]:
        """Returns the shares of a strip's attention in layers that see all of a tile; in others it
        is one. A small strip may lack the queries of some."""
        return _shares(self, tile)

    def joined(self, tile: Size, first: int, count: int) -> tuple[Share, int]:
        """Returns the largest share that is several neighbours of `shares` from `first` on, of so
        many, and their number: heads with all of their queries, or queries of one head."""
        own = self.shares(tile)[first : first + count]
        found = box = own[0]
        number, num_queries = 1, 0
        for place, each in enumerate(own, 1):
            ends = max(box.end, each.end), box.first_head, each.end_head
            box = Share(min(box.first, each.first), *ends)
            num_queries += each.num_queries
            if box.num_queries == num_queries:
                found, number = box, place
        return found, number

    def per_strip(self, tile: Size) -> tuple[int, ...]:
        """Returns the units of a strip before the first layer's attention, and in each layer. The
        products of a layer are a unit of their own if attention has several."""
        num_shares = len(self.shares(tile))
        count = num_shares + 1 if num_shares > 1 else 1
        return (1, *(count if sees_all else 1 for sees_all in self.sees_all))

    def count(self, tile: Size) -> int:
        """Returns the units of a tile."""
        return len(self.tiles.strips(tile)) * sum(self.per_strip(tile))

    def find(self, tile: Size, index: int) -> Unit:
        """Returns a tile's unit at a place in order."""
        num_strips, counts = len(self.tiles.strips(tile)), self.per_strip(tile)
        for layer, end in enumerate(accumulate(num_strips * count for count in counts)):
            if index < end:
                place = index - (end - num_strips * counts[layer])
                return Unit(layer, *divmod(place, counts[layer]), counts[layer])
        raise IndexError(f"a tile has no unit {index}")


@lru_cache(maxsize=64)
def _shares(units: TowerUnits, tile: Size) -> tuple[Share, ...]:
    num_heads, num_threads = units.num_heads, units.num_threads
    num_queries = max(end - start for start, end in units.tiles.strips(tile))
    if units.most_pairs is None:
        return (Share(0, num_queries, 0, num_heads),)
    num_pairs = num_queries * num_heads * units.tiles.inner_tokens(tile)
    wanted = -(-num_pairs // units.most_pairs)
    # No thread without a pass: the others' would take as long.
    num_passes = -(-num_queries // PASS_QUERIES)
    per_head = min(-(-wanted // num_heads), max(num_passes // num_threads, 1))
    if per_head > 1:
        return tuple(_shares_of_heads(num_heads, num_queries, per_head))
    least_heads = min(-(-num_threads // num_passes), num_heads)
    count = min(wanted, num_heads // least_heads)
    borders = [num_heads * index // count for index in range(count + 1)]
    return tuple(Share(0, num_queries, *heads) for heads in pairwise(borders))


def _shares_of_heads(num_heads: int, num_queries: int, per_head: int) -> Iterator[Share]:
    """Yields shares of one head each, so many of each head, of whole passes."""
    num_passes = -(-num_queries // PASS_QUERIES)
    ends = [num_passes * index // per_head * PASS_QUERIES for index in range(per_head + 1)]
    for head in range(num_heads):
        for first, end in pairwise(ends):
            yield Share(first, min(end, num_queries), head, head + 1)
