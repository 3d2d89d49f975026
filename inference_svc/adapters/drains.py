"""Room for those that waited too long: adapters in use that nobody new may use meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain

from inference_svc.adapters.slots import Slots
from inference_svc.adapters.store import ImageHeader


@dataclass
class Drains:
    """Which images of `device` drain for which digest."""

    device: Slots
    _picked: dict[str, frozenset[str]] = field(default_factory=dict)

    def __contains__(self, digest: str) -> bool:
        return any(digest in picked for picked in self._picked.values())

    def start(self, digest: str, header: ImageHeader, ahead: Collection[str]) -> list[str]:
        """Picks images to drain for this one, none of `ahead`. They stay picked as long as
        somebody uses them, or none would ever be given up. Returns what drains no more."""
        before = self._picked.get(digest, frozenset())
        if any(
            resident is not None and resident.users for resident in map(self.device.get, before)
        ):
            return []
        others = chain.from_iterable(self._picked.values())
        victims = self.device.to_drain(header, {*ahead, *others} - before)
        self._picked[digest] = frozenset(victim.digest for victim in victims or ())
        return list(before)

    def end(self, is_short: Callable[[str], bool]) -> list[str]:
        """Forgets the digests that need no room any more. Returns what drains no more."""
        over = [digest for digest in self._picked if not is_short(digest)]
        return [drained for digest in over for drained in self._picked.pop(digest)]
