"""Decides which pictures a step computes, and which embeddings stay.

A prompt's tokens before a picture are computed without it; its rows wait at the picture until the
embeddings are there. They are made in units, see `TowerUnits`, so that a large picture stalls no
tokens of texts, and one picture after the other, because a picture that is begun takes much memory.
Tenants whose pictures wait take turns. Plain Python over plain data; no tensors.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from inference_svc.core import BASE_SLOT, AdapterKey, Batch, Sequence
from inference_svc.pictures.prompt import Encode, PictureKey, PictureWork, PromptPicture
from inference_svc.pictures.sizes import Size
from inference_svc.pictures.units import TowerUnits

BESIDE_SHARE = 1 / 16
"""Share of the time of a step of generated tokens that pictures may take beside them."""
KEPT = 0.9
"""Share of earlier steps in what is known, behind each step."""
ROUNDING = 1e-9
"""The share by which sums of costs may be too small: it buys no unit more."""


@dataclass(frozen=True, slots=True)
class TowerCosts:
    """The costs of a tower's `units`: of a layer, in tokens of a prompt, for each patch, and for
    each patch that it sees; and the bytes of a picture's token."""

    units: TowerUnits
    tokens_per_patch: float
    tokens_per_pair: float
    row_bytes: int

    def num_units(self, picture: PromptPicture) -> int:
        """Returns the units of a picture's work."""
        return picture.num_tiles * _prices(self, picture.tile).num_units

    def of_first(self, picture: PromptPicture, count: int) -> float:
        """Returns the cost of a picture's first units, so many."""
        prices = _prices(self, picture.tile)
        tiles, left = divmod(count, prices.num_units)
        return tiles * prices.cost + prices.of_first(left)

    def num_within(self, picture: PromptPicture, first: int, budget: float) -> int:
        """Returns how many of a picture's units, from `first` on, cost no more than this."""
        if budget <= 0:
            return 0
        prices = _prices(self, picture.tile)
        paid = (self.of_first(picture, first) + budget) * (1 + ROUNDING)
        tiles, left = divmod(paid, prices.cost)
        found = int(tiles) * prices.num_units + prices.num_within(left)
        return max(min(found, picture.num_tiles * prices.num_units) - first, 0)


class _LayerPrices(NamedTuple):
    """The prices of a layer, of which the units of all strips cost the same. The units of a strip
    end at the costs `ends`, counted from its first one."""

    num_strips: int
    ends: tuple[float, ...]

    @property
    def cost(self) -> float:
        return self.num_strips * self.ends[-1]

    def of_first(self, count: int) -> float:
        """Returns the cost of the first units, so many."""
        strips, share = divmod(count, len(self.ends))
        return strips * self.ends[-1] + (self.ends[share - 1] if share else 0.0)

    def num_within(self, cost: float) -> int:
        """Returns how many of the first units cost no more than this."""
        strips, left = divmod(cost, self.ends[-1])
        return int(strips) * len(self.ends) + bisect_right(self.ends, left)


class _Prices(NamedTuple):
    """The prices of a tile's units: each of the `layers`, of which the first is the work before any
    attention, begins at a unit of `firsts`, and at a cost of `paid`."""

    layers: tuple[_LayerPrices, ...]
    firsts: tuple[int, ...]
    paid: tuple[float, ...]
    num_units: int
    cost: float

    def of_first(self, count: int) -> float:
        """Returns the cost of the first units of the tile, so many, but not all."""
        layer = bisect_right(self.firsts, count) - 1
        return self.paid[layer] + self.layers[layer].of_first(count - self.firsts[layer])

    def num_within(self, cost: float) -> int:
        """Returns how many of the first units cost no more than this, which pays not for all."""
        layer = bisect_right(self.paid, cost) - 1
        return self.firsts[layer] + self.layers[layer].num_within(cost - self.paid[layer])


@lru_cache(maxsize=64)
def _prices(costs: TowerCosts, tile: Size) -> _Prices:
    units, form = costs.units, costs.units.tiles
    strips, shares = form.strips(tile), units.shares(tile)
    most, largest = max(end - start for start, end in strips), max(form.windows(tile))
    own, num_all = most * costs.tokens_per_patch, form.inner_tokens(tile)

    def ends(sees_all: bool) -> tuple[float, ...]:
        if not sees_all:
            return (own + most * largest * costs.tokens_per_pair,)
        price = num_all * costs.tokens_per_pair / units.num_heads
        *others, last = accumulate(each.num_queries * price for each in shares)
        # The products behind one share are of its unit.
        return (*others, last, last + own) if others else (last + own,)

    of_layers = ((own,), *map(ends, units.sees_all))
    layers = tuple(_LayerPrices(len(strips), each) for each in of_layers)
    *firsts, num_units = accumulate(
        (each.num_strips * len(each.ends) for each in layers), initial=0
    )
    *paid, cost = accumulate((each.cost for each in layers), initial=0.0)
    return _Prices(layers, tuple(firsts), tuple(paid), num_units, cost)


@dataclass
class Pace:
    """The seconds that pictures and steps of generated tokens have taken lately, as decayed sums:
    of pictures by cost, of steps by number."""

    _cost: float = 0.0
    _cost_s: float = 0.0
    _num_steps: float = 0.0
    _steps_s: float = 0.0

    def note_pictures(self, cost: float, seconds: float) -> None:
        """Notes work of pictures of this cost, in tokens of a prompt."""
        self._cost = KEPT * self._cost + cost
        self._cost_s = KEPT * self._cost_s + seconds

    def note_step(self, seconds: float) -> None:
        """Notes a step in which each row had one token, without its pictures."""
        self._num_steps = KEPT * self._num_steps + 1
        self._steps_s = KEPT * self._steps_s + seconds

    @property
    def beside(self) -> float:
        """The cost of pictures that a step may have beside generated tokens; 0 until both are
        known."""
        if not self._cost_s or not self._num_steps:
            return 0.0
        return BESIDE_SHARE * self._steps_s / self._num_steps * self._cost / self._cost_s


@dataclass(slots=True)
class _Entry:
    """Embeddings that are there, or begun: `num_left` of `num_units` are missing, and `num_holders`
    sequences are at the picture."""

    tenant: str
    num_bytes: int
    num_units: int
    num_left: int
    num_holders: int = 0


@dataclass(slots=True)
class _Tenant:
    """The bytes of a tenant's entries, and the `idle` ones, which no sequence holds, the least
    recently held first."""

    num_bytes: int = 0
    idle: OrderedDict[PictureKey, None] = field(default_factory=OrderedDict)


@dataclass
class PictureMemory:
    """Embeddings of pictures within `capacity` bytes. A sequence holds the ones of a picture from
    the step in which they begin to be made until it has passed its tokens, or stops to run; others
    stay until there is no room: then the tenant with most of them loses its least recently
    held. Smaller tenants lose nothing to a larger tenant, except to its first picture: the larger
    one waits until its own sequences let go. Adapters that `changes_pictures` names have embeddings
    of their own; it is asked only of resident ones.

    A sequence holds pictures at one place of its prompt, and needs no more to pass it: so there is
    always a sequence that goes on. Where a picture's tokens `are_mutual`, which see each other, one
    step computes all of them.

    Of `num_bytes`, sequences hold `num_held_bytes`. `num_dropped` pictures have lost theirs, other
    than to `forget`.
    """

    capacity: int
    costs: TowerCosts
    max_tokens: int
    changes_pictures: Callable[[AdapterKey], bool]
    are_mutual: bool = False
    num_bytes: int = 0
    num_held_bytes: int = 0
    num_encoded: int = 0
    num_found: int = 0
    num_dropped: int = 0
    _entries: dict[PictureKey, _Entry] = field(default_factory=dict)
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _dropped: list[PictureKey] = field(default_factory=list)
    _encodes: dict[PictureKey, Encode] = field(default_factory=dict)
    _begun: PictureKey | None = None
    _budget: float = 0.0
    _may_exceed: bool = False
    _turns: dict[str, int] = field(default_factory=dict)
    """When each tenant had its last turn, as a number of pictures that were begun."""
    _costs: dict[PictureKey, tuple[Sequence, int]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    @property
    def num_kept(self) -> int:
        """The pictures whose embeddings are there, or begun."""
        return len(self._entries)

    def begin(self, running: SequenceOf[Sequence]) -> None:
        """Begins a step of these running sequences, in order of rank: says how much it may compute
        of pictures, as of prompts, or little while texts generate; and plans the ones that
        sequences have come to."""
        texts = (each for each in running if not each.request.pictures)
        generates = any(each.num_uncomputed == 1 for each in texts)
        self._budget = min(self.pace.beside, self.max_tokens) if generates else self.max_tokens
        self._may_exceed = True
        for sequence in self._in_turn(running):
            self._come(sequence)

    def _in_turn(self, running: SequenceOf[Sequence]) -> Iterator[Sequence]:
        """Yields the sequences with pictures: first the ones at the picture that is begun, then one
        of the tenant whose last picture was begun longest ago, again and again."""
        others: dict[str, deque[Sequence]] = {}
        for each in running:
            if not each.request.pictures:
                continue
            if self._begun is not None and self._begun in each.held_pictures.values():
                yield each
            else:
                others.setdefault(each.request.tenant, deque()).append(each)
        if others:  # a tenant that has neither a picture here nor waits for one begins anew
            kept = self._tenants.keys() | others.keys()
            self._turns = {name: turn for name, turn in self._turns.items() if name in kept}
        turns = [(self._turns.get(name, 0), place, name) for place, name in enumerate(others)]
        heapq.heapify(turns)
        while turns:
            _, place, name = turns[0]
            yield others[name].popleft()
            if others[name]:
                heapq.heapreplace(turns, (self._turns.get(name, 0), place, name))
            else:
                heapq.heappop(turns)

    def _come(self, sequence: Sequence) -> None:
        """Lets go of the pictures behind a sequence's computed tokens, and notes how it goes on if
        it has come to the next one."""
        start = sequence.num_computed
        sequence.awaits_picture, sequence.num_at_once = False, 0
        for index, picture in enumerate(sequence.request.pictures):
            if picture.end <= start:
                self._let_go(sequence, index)
            elif picture.start > start:
                return
            else:
                sequence.awaits_picture = not self._make(sequence, index)
                if self.are_mutual and not sequence.awaits_picture:
                    sequence.num_at_once = picture.end - start
                return

    def num_computable(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns how many of its next tokens a sequence may have computed, after the work that
        this plans for the step: up to the first picture that will not be there."""
        self._come(sequence)
        start = sequence.num_computed
        for index, picture in enumerate(sequence.request.pictures):
            if picture.end <= start:
                continue
            if picture.start >= start + num_tokens:
                break
            # It begins before the next token if the tokens before this one are cached.
            is_cut = self.are_mutual and picture.end > start + num_tokens
            if not self._make(sequence, index) or is_cut:
                return max(0, picture.start - start)
        return num_tokens

    def release(self, sequence: Sequence) -> None:
        """Lets go of all that a sequence holds, which stops to run."""
        for index in tuple(sequence.held_pictures):
            self._let_go(sequence, index)
        sequence.awaits_picture, sequence.num_at_once = False, 0

    def pop_work(self) -> PictureWork:
        """Returns the step's work."""
        cost = sum(map(self._cost, self._encodes.values()))
        work = PictureWork(tuple(self._dropped), tuple(self._encodes.values()), cost)
        self._dropped, self._encodes = [], {}
        return work

    def note(self, batch: Batch, pictures_s: float, rows_s: float) -> None:
        """Notes the seconds that a step has taken for its pictures and for its rows."""
        if batch.pictures.cost:
            self.pace.note_pictures(batch.pictures.cost, pictures_s)
        if batch.rows and all(row.num_tokens == 1 for row in batch.rows):
            self.pace.note_step(rows_s)

    def pop_costs(self) -> list[tuple[Sequence, int]]:
        """Returns the costs of the step's work, in tokens of a prompt, with the sequences that it
        is done for. The costs of a picture add up."""
        costs, self._costs = self._costs, {}
        return list(costs.values())

    def forget(self) -> None:
        """Drops everything: its memory is lost. No sequence holds any."""
        assert not any(each.num_holders for each in self._entries.values())
        self._entries.clear()
        self._tenants.clear()
        self._dropped, self._encodes, self.num_bytes = [], {}, 0
        self._begun = None
        self._turns.clear()
        self._costs = {}

    def _make(self, sequence: Sequence, index: int) -> bool:
        """Returns whether a picture's embeddings will be there in this step."""
        request = sequence.request
        picture = request.pictures[index]
        key = sequence.held_pictures.get(index) or self._key(sequence, picture)
        entry = self._entries.get(key)
        num_units = 0
        if entry is None or entry.num_left:
            if not self._may_compute(key):
                return False
            num_units = self._num_units(picture, entry)
        if entry is None:
            num_bytes = picture.num_tokens * self.costs.row_bytes
            if not num_units or not self._make_room(request.tenant, num_bytes):
                return False
            num_all = self.costs.num_units(picture)
            entry = self._entries[key] = _Entry(request.tenant, num_bytes, num_all, num_all)
            self._begun = key
            self._turns[request.tenant] = self.num_encoded + 1
            self.num_bytes += num_bytes
            self._tenants.setdefault(request.tenant, _Tenant()).num_bytes += num_bytes
            self.num_encoded += 1
        elif index not in sequence.held_pictures:
            self.num_found += 1
        if index not in sequence.held_pictures:
            sequence.held_pictures[index] = key
            self.num_held_bytes += 0 if entry.num_holders else entry.num_bytes
            entry.num_holders += 1
            self._tenants[entry.tenant].idle.pop(key, None)
        if entry.num_left and num_units:
            self._plan(sequence, picture, key, num_units)
        return not entry.num_left

    def _plan(
        self, sequence: Sequence, picture: PromptPicture, key: PictureKey, count: int
    ) -> None:
        """Has so many more units of a picture computed in this step."""
        entry, planned = self._entries[key], self._encodes.get(key)
        slot = sequence.slot if key.adapter else BASE_SLOT
        before = entry.num_units - entry.num_left
        paid, due = (self.costs.of_first(picture, each) for each in (before, before + count))
        entry.num_left -= count
        self._budget -= due - paid
        self._may_exceed = False
        if planned is not None:
            count += planned.num_units
            paid = self.costs.of_first(picture, before - planned.num_units)
        self._encodes[key] = Encode(key, picture, count, slot)
        self._costs[key] = sequence, int(due) - int(paid)

    def _cost(self, planned: Encode) -> float:
        """Returns the cost of units that are planned for this step."""
        entry = self._entries[planned.key]
        end = entry.num_units - entry.num_left
        of_first = partial(self.costs.of_first, planned.picture)
        return of_first(end) - of_first(end - planned.num_units)

    def _key(self, sequence: Sequence, picture: PromptPicture) -> PictureKey:
        request = sequence.request
        is_own = bool(request.key) and self.changes_pictures(request.key)
        return PictureKey(request.cache_seed, request.key if is_own else "", picture.digest)

    def _may_compute(self, key: PictureKey) -> bool:
        """Returns whether no other picture is begun. One whose sequences do not run any more is
        dropped."""
        if self._begun is None or self._begun == key:
            return True
        begun = self._entries.get(self._begun)
        if begun is None or not begun.num_left:
            return True
        if begun.num_holders:
            return False
        self._drop(self._begun)
        return True

    def _num_units(self, picture: PromptPicture, entry: _Entry | None) -> int:
        """Returns how many units of a picture the step may still compute: the first one always."""
        num_done = 0 if entry is None else entry.num_units - entry.num_left
        found = self.costs.num_within(picture, num_done, self._budget)
        return max(found, int(self._may_exceed))

    def _make_room(self, tenant: str, num_bytes: int) -> bool:
        """Drops embeddings that no sequence holds, to make room for a picture of a tenant: first of
        the tenant with most bytes, this picture included; of equal tenants its own. Returns whether
        there is room then."""
        if self.num_bytes + num_bytes <= self.capacity:
            return True
        own = self._tenants.get(tenant, _Tenant())

        def place(name: str) -> tuple[int, bool, str]:
            added = num_bytes if name == tenant else 0
            return -self._tenants[name].num_bytes - added, name != tenant, name

        largest = [place(name) for name, each in self._tenants.items() if each.idle]
        heapq.heapify(largest)
        while self.num_bytes + num_bytes > self.capacity:
            if not largest:
                return False
            size, is_other, name = largest[0]
            if is_other and own.num_bytes and -size < own.num_bytes + num_bytes:
                return False  # its own sequences hold all it has, and let go soon
            idle = self._tenants[name].idle
            self._drop(next(iter(idle)))
            if idle:
                heapq.heapreplace(largest, place(name))
            else:
                heapq.heappop(largest)
        return True

    def _drop(self, key: PictureKey) -> None:
        entry = self._entries.pop(key)
        tenant = self._tenants[entry.tenant]
        del tenant.idle[key]
        tenant.num_bytes -= entry.num_bytes
        if not tenant.num_bytes:
            del self._tenants[entry.tenant]
        self.num_bytes -= entry.num_bytes
        self._dropped.append(key)
        self.num_dropped += 1

    def _let_go(self, sequence: Sequence, index: int) -> None:
        key = sequence.held_pictures.pop(index, None)
        if key is None:
            return
        entry = self._entries[key]
        entry.num_holders -= 1
        if entry.num_holders:
            return
        self.num_held_bytes -= entry.num_bytes
        self._tenants[entry.tenant].idle[key] = None
        # It was preempted in this step: at its slot there may be another adapter already.
        planned = self._encodes.pop(key, None)
        if planned is not None:
            del self._costs[key]
            self._budget += self._cost(planned)
            entry.num_left += planned.num_units
            if key != self._begun:  # the step has begun another one behind it
                self._drop(key)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that bytes and holders agree with the running sequences."""
        holders: dict[PictureKey, int] = {}
        for sequence in running:
            for key in sequence.held_pictures.values():
                holders[key] = holders.get(key, 0) + 1
        assert holders == {k: e.num_holders for k, e in self._entries.items() if e.num_holders}
        assert self.num_bytes == sum(each.num_bytes for each in self._entries.values())
        assert self.num_bytes <= self.capacity
        held = (each.num_bytes for each in self._entries.values() if each.num_holders)
        assert self.num_held_bytes == sum(held)
        assert self._tenants.keys() == {each.tenant for each in self._entries.values()}
        for name, tenant in self._tenants.items():
            own = {key: each for key, each in self._entries.items() if each.tenant == name}
            assert tenant.num_bytes == sum(each.num_bytes for each in own.values())
            assert set(tenant.idle) == {key for key, each in own.items() if not each.num_holders}
