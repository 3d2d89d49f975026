"""Combinations: sums of adapters that one request runs with. To the scheduler each is one adapter,
which is resident when all its parts are; to `residency` it is a waiter, or a user, of each part.

Nothing is held while a combination waits: its parts are acquired at once, when all of them are
resident. None waits for ever: whose turn comes first is decided among requests, parts follow one
another in that order (`in_order`), and memory for an aged one is taken from the requests behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_svc.adapters.image_source import ImageHeader
from inference_svc.adapters.layout import ModelLayout, listed
from inference_svc.adapters.residency import Residency
from inference_svc.adapters.tiers import ResidencyChange
from inference_svc.core import Part, is_combination, parts_of
from inference_svc.errors import AdapterUnusable, NoRoom
from kernels.lora.table import MAX_PARTS
from servicekit.errors import ServiceError


@dataclass(slots=True)
class _Mix:
    slot: int
    users: int = 0


@dataclass
class Combinations:
    """Gives combinations `num_mixes` mixes of the table, whose first rows begin at `first_slot`:
    one to each that runs. Every digest may be one adapter's, too. Single adapters may add up to
    `max_added_tokens` to the vocabulary."""

    residency: Residency
    layout: ModelLayout
    first_slot: int
    num_mixes: int
    max_added_tokens: int
    _mixes: dict[str, _Mix] = field(default_factory=dict)
    _free: list[int] = field(init=False)
    _waiting: Counter[str] = field(default_factory=Counter)
    """The requests that wait for each combination."""
    _waiting_for: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The waiting combinations of each part."""

    def __post_init__(self) -> None:
        last = self.first_slot + self.num_mixes * MAX_PARTS
        self._free = list(range(self.first_slot, last, MAX_PARTS))[::-1]

    # Waiting.

    def add_waiter(self, digest: str, now_s: float, count: bool = True) -> None:
        for part in parts_of(digest):
            self.residency.add_waiter(part.digest, now_s, count)
            if is_combination(digest):
                self._waiting_for[part.digest].add(digest)
        if is_combination(digest):
            self._waiting[digest] += 1

    def remove_waiter(self, digest: str, *, expired: bool = False) -> None:
        self._stop_waiting(digest)
        for part in parts_of(digest):
            self.residency.remove_waiter(part.digest, expired=expired)

    def _stop_waiting(self, digest: str) -> None:
        if not is_combination(digest):
            return
        self._waiting[digest] -= 1
        if self._waiting[digest]:
            return
        del self._waiting[digest]
        for part in parts_of(digest):
            self._waiting_for[part.digest].discard(digest)
            if not self._waiting_for[part.digest]:
                del self._waiting_for[part.digest]

    def ensure_loading(self, digest: str, now_s: float) -> None:
        for part in parts_of(digest):
            self.residency.ensure_loading(part.digest, now_s)

    def trace_load(self, digest: str, asker: Any, now_s: float) -> Any:
        """See Residency.trace_load; of a combination the first load that is a part of another."""
        loads = [self.residency.trace_load(p.digest, asker, now_s) for p in parts_of(digest)]
        return next((load for load in loads if load is not None), None)

    def waiting_with(self, digest: str) -> list[str]:
        """Returns the digest, and the waiting combinations that it is a part of."""
        return [digest, *sorted(self._waiting_for.get(digest, ()))]

    def in_order(self, digests: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """Yields parts in place of combinations."""
        for digest, is_aged in digests:
            for part in parts_of(digest):
                yield part.digest, is_aged

    def store_waits_since_s(self, digest: str) -> dict[str, float]:
        """Returns the parts that wait for the store, and since when."""
        since = {p.digest: self.residency.store_wait_since_s(p.digest) for p in parts_of(digest)}
        return {part: since_s for part, since_s in since.items() if since_s is not None}

    # Running.

    def is_schedulable(self, digest: str) -> bool:
        return all(self.residency.is_schedulable(part.digest) for part in parts_of(digest))

    def acquire(self, digest: str) -> int:
        """See Residency.acquire; returns the mix's slot for a combination."""
        if not is_combination(digest):
            return self.residency.acquire(digest)
        self._stop_waiting(digest)
        slots = tuple(
            (self.residency.acquire(part.digest), part.scale) for part in parts_of(digest)
        )
        mix = self._mixes.get(digest)
        if mix is None:
            mix = self._mixes[digest] = _Mix(self._free.pop())
            self.residency.tiers.write_mix(mix.slot, slots)
        mix.users += 1
        return mix.slot

    def release(self, digest: str) -> None:
        """See Residency.release."""
        mix = self._mixes.get(digest)
        if mix is not None:
            mix.users -= 1
            if not mix.users:
                del self._mixes[digest]
                self._free.append(mix.slot)
        for part in parts_of(digest):
            self.residency.release(part.digest)

    def pop_ready(self) -> list[str]:
        """See Residency.pop_ready; the combinations of each that wait follow it."""
        ready = self.residency.pop_ready()
        return list(dict.fromkeys(each for part in ready for each in self.waiting_with(part)))

    def pop_changes(self) -> tuple[ResidencyChange, ...]:
        return self.residency.pop_changes()

    # Refusals.

    @property
    def waiting(self) -> list[str]:
        """The combinations that requests wait for."""
        return list(self._waiting)

    def refusal(self, digest: str) -> tuple[str, ServiceError] | None:
        """Returns why a combination can never run, as far as is known of its parts, and the part
        that the error names, if it names one."""
        if not is_combination(digest):
            return None
        parts = parts_of(digest)
        headers = {
            part: header for part in parts if (header := self._header(part.digest)) is not None
        }
        refused = self._refused_part(headers) or self._refused_lookup(headers)
        if refused is not None:
            return refused
        if not self.residency.device.admits_together(len(parts), list(headers.values())):
            message = (
                f"the {len(parts)} adapters of the request do not fit into the memory for adapters "
                "together: use fewer, unpin others, or raise --adapter-memory or --max-loras"
            )
            return "", NoRoom(message, subject="adapters")
        return None

    def _refused_part(self, headers: Mapping[Part, ImageHeader]) -> tuple[str, ServiceError] | None:
        """Returns why the parts cannot be summed: of each target at most one may scale or replace a
        weight of the base, and the replacement is either there or not."""
        replaced = set[str]()
        for part, header in headers.items():
            names = sorted(self.layout.replaced_targets(header))
            if names and part.scale != 1.0:
                message = (
                    f"adapter {part.digest} scales or replaces the model's own weights of "
                    f"{listed(names)}: give it the scale 1, not {part.scale:g}, or use it alone"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
            twice = [name for name in names if name in replaced]
            if twice:
                message = (
                    f"adapter {part.digest} cannot be summed with one before it: both scale or "
                    f"replace the model's own weights of {listed(twice)}"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
            replaced.update(names)
        return None

    def _refused_lookup(
        self, headers: Mapping[Part, ImageHeader]
    ) -> tuple[str, ServiceError] | None:
        """Returns why not either: rows of one part may be of tokens that it adds, for which A of
        another's embedding has none."""
        if not self.max_added_tokens:
            return None
        for part, header in headers.items():
            others = (each for other, each in headers.items() if other != part)
            if self.layout.has_lookup(header) and any(map(_has_row_ids, others)):
                message = (
                    f"adapter {part.digest} has A and B of the embedding, and cannot be summed "
                    "with an adapter that has rows of its own for tokens: its tokens may lie "
                    "after the vocabulary (--max-added-tokens)"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
        return None

    def _header(self, part: str) -> ImageHeader | None:
        """Returns None before its pull has opened."""
        resident = self.residency.device.get(part) or self.residency.tiers.host_resident(part)
        load = self.residency.loads.get(part)
        return resident.header if resident is not None else load.header if load else None

    def check_integrity(self, waiting: Counter[str], running: Counter[str]) -> None:
        """Asserts that the mixes and waiters belong to these requests, counted by digest."""
        assert self._waiting == Counter({d: n for d, n in waiting.items() if is_combination(d)})
        users = {digest: mix.users for digest, mix in self._mixes.items()}
        assert users == {d: n for d, n in running.items() if is_combination(d)}
        slots = [mix.slot for mix in self._mixes.values()] + self._free
        assert len(set(slots)) == len(slots) == self.num_mixes, "a mix is lost or held twice"
        for part, combinations in self._waiting_for.items():
            assert combinations, "an empty set of combinations"
            assert all(part in {p.digest for p in parts_of(each)} for each in combinations)


def _has_row_ids(header: ImageHeader) -> bool:
    return any(segment.kind == "row_ids" for segment in header.segments)
