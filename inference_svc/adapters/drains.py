"""Room for those that waited too long: adapters that nobody new may use until it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain

from inference_svc.adapters.image_source import ImageHeader
from inference_svc.adapters.slots import Slots


@dataclass
class Drains:
    """Which images of `device` drain for which digest."""

    device: Slots
    _picked: dict[str, frozenset[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._picked)

    def __contains__(self, digest: str) -> bool:
        return any(digest in picked for picked in self._picked.values())

    def start(self, digest: str, header: ImageHeader, ahead: Collection[str]) -> list[str]:
        """Picks images to drain for this one, none of `ahead`. All stay picked as long as somebody
        uses one of them: else they would be used in turn for ever. Returns what drains no more."""
        if self._is_in_use(digest):
            return []
        before = self._picked.get(digest, frozenset())
        others = chain.from_iterable(self._picked.values())
        victims = self.device.to_drain(header, {*ahead, *others} - before)
        self._picked[digest] = frozenset(victim.digest for victim in victims or ())
        return list(before)

    def drained(self, waiters: Collection[str]) -> list[tuple[str, set[str]]]:
        """The digests for which all has drained, each with what it may not evict: what others
        wait for."""
        wanted = {r.digest for r in self.device.residents() if r.digest in waiters}
        return [
            (digest, wanted - picked)
            for digest, picked in self._picked.items()
            if not self._is_in_use(digest)
        ]

    def end(self, is_over: Callable[[str], bool]) -> list[str]:
        """Forgets the digests that need no room any more. Returns what drains no more."""
        over = [digest for digest in self._picked if is_over(digest)]
        return [drained for digest in over for drained in self._picked.pop(digest)]

    def _is_in_use(self, digest: str) -> bool:
        residents = map(self.device.get, self._picked.get(digest, ()))
        return any(resident is not None and resident.users for resident in residents)
