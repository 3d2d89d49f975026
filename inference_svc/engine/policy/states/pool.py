"""Units of memory that sequences hold and share: reference counts, and keys by which a later
sequence finds a unit with equal contents. Plain bookkeeping without tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class UnitPool:
    """`num_units` units, by number.

    A unit without references is free, but keeps its key until it is allocated again, so that a
    later prefix can reuse it; among free units those without a key are allocated first, then the
    least recently used. Without `caching` no unit gets a key.
    """

    def __init__(self, num_units: int, caching: bool = True) -> None:
        assert num_units > 0
        self.num_units = num_units
        self.caching = caching
        self.num_evictions = 0
        """Keyed units that were allocated anew."""
        self._references = [0] * num_units
        self._keys: list[bytes | None] = [None] * num_units
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_units))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_units - len(self._free)

    @property
    def num_known(self) -> int:
        """Units, used or free, that a prefix can match."""
        return len(self._by_key)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free units and drops their former keys."""
        assert self.can_allocate(count)
        units = []
        for _ in range(count):
            unit, _none = self._free.popitem(last=False)
            self._drop_key(unit)
            self._references[unit] = 1
            units.append(unit)
        return units

    def find(self, key: bytes) -> int | None:
        """Returns the unit with this key, without referencing it: call `share` next."""
        return self._by_key.get(key)

    def is_private(self, unit: int) -> bool:
        """Whether a unit has one holder, and no key by which others may come to share it."""
        return self._references[unit] == 1 and self._keys[unit] is None

    def num_free_among(self, units: Iterable[int]) -> int:
        """Returns how many of these units `share` would take from the free ones."""
        return sum(self._references[unit] == 0 for unit in units)

    def num_released(self, units: Iterable[int]) -> int:
        """Returns how many of these units `release` would make free."""
        return sum(self._references[unit] == 1 for unit in units)

    def share(self, units: Iterable[int]) -> None:
        """Adds a reference to each unit."""
        for unit in units:
            if self._references[unit] == 0:
                del self._free[unit]
            self._references[unit] += 1

    def publish(self, unit: int, key: bytes) -> None:
        """Keys a unit whose contents are final: equal prefixes may share it from now on."""
        assert self._references[unit] > 0
        if self.caching and key not in self._by_key and self._keys[unit] is None:
            self._by_key[key] = unit
            self._keys[unit] = key

    def release(self, units: Sequence[int]) -> None:
        """Drops a reference to each unit; the ends of prefixes are the first to be reused."""
        for unit in reversed(units):
            assert self._references[unit] > 0, "unit freed twice"
            self._references[unit] -= 1
            if self._references[unit] == 0:
                self._free[unit] = None
                if self._keys[unit] is None:
                    self._free.move_to_end(unit, last=False)

    def forget_keys(self) -> None:
        """Drops all keys."""
        self._keys = [None] * self.num_units
        self._by_key.clear()

    def _drop_key(self, unit: int) -> None:
        key = self._keys[unit]
        if key is not None:
            del self._by_key[key]
            self._keys[unit] = None
            self.num_evictions += 1

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts that the references are exactly the ones of `holders` (lists of units)."""
        counted = [0] * self.num_units
        for units in holders:
            for unit in units:
                counted[unit] += 1
        assert counted == self._references, "references without a holder, or the reverse"
        assert len(self._free) == counted.count(0)
        assert not any(map(counted.__getitem__, self._free))
        assert list(map(self._keys.__getitem__, self._by_key.values())) == list(self._by_key)
        assert self.num_units - self._keys.count(None) == len(self._by_key)
