"""Which images lie in one memory: rows, extents, pins and users, in the order of their last use.

Plain bookkeeping without tensors. The arena has one `Slots` whose rows are the table's; the host
tier has another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from contract.images.header import ImageHeader, align
from inference_svc.adapters.memory.eviction import (
    EvictionReason,
    can_evict,
    drain_order,
    eviction_order,
)
from inference_svc.adapters.memory.pins import Pins
from inference_svc.adapters.memory.resident import Resident, Shape
from inference_svc.adapters.memory.stages import StageMemories, parts_of, shape_of


class Reservation(NamedTuple):
    """Memory for an image that is not ready yet, and the images evicted for it."""

    resident: Resident
    evicted: list[Resident]


class Slots:
    """Images in a memory of `capacity` bytes in each stage, at most `max_images` of them.

    `largest` are the shapes of the parts of the largest image of A and B alone, by stage. An
    account pins at most `pin_share` of the rows, and of the bytes, that others' pins leave: see
    Pins.
    """

    def __init__(
        self,
        capacity: int,
        max_images: int,
        largest: Sequence[Shape] = (),
        pin_share: float = 1.0,
        num_stages: int = 1,
    ) -> None:
        assert max_images > 0
        self.extents = StageMemories(capacity, num_stages)
        self.max_images = max_images
        self.largest = largest
        self.pins = Pins(capacity, max_images, largest, pin_share, num_stages)
        # Unused superseded ones first, then the least recently used.
        self._by_digest: OrderedDict[str, Resident] = OrderedDict()
        self._superseded: set[str] = set()
        self._free_slots = list(range(max_images - 1, -1, -1))
        self.evictions: Counter[EvictionReason] = Counter()

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def get(self, digest: str) -> Resident | None:
        return self._by_digest.get(digest)

    def residents(self) -> list[Resident]:
        return list(self._by_digest.values())

    def last_used_first(self) -> Iterator[Resident]:
        """Iterates over the images, unused superseded ones last. They must not change during
        that."""
        return reversed(self._by_digest.values())

    @property
    def num_evictions(self) -> int:
        return self.evictions.total()

    @property
    def pinned_bytes(self) -> int:
        return self.pins.num_bytes

    @property
    def capacity(self) -> int:
        return self.extents.capacity

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity - self.extents.free_bytes

    def reserve(
        self,
        header: ImageHeader,
        keep: Collection[str] = (),
        waited_for: Collection[str] = (),
        reason: EvictionReason = EvictionReason.REQUEST,
    ) -> Reservation | None:
        """Reserves memory for an image, evicting as few as needed: images not `waited_for` first,
        among these superseded ones, then the least recently used; never those in `keep`.

        Returns None, and evicts nothing, when that does not suffice.
        """
        assert header.digest not in self._by_digest, "reserved twice"
        parts = shape_of(header)
        evictable = eviction_order(self._by_digest.values(), keep, waited_for)
        victims = self._until_fits(parts, evictable)
        if victims is None:
            return None
        for victim in victims:
            self.evictions[reason] += 1
            self.remove(victim.digest)
        extents = self.extents.allocate(parts)
        assert extents is not None, "planned, and does not fit"
        resident = Resident(header, self._free_slots.pop(), extents, header.rank)
        self._by_digest[header.digest] = resident
        self._put_superseded_first(resident)
        return Reservation(resident, victims)

    def choose_drained(self, header: ImageHeader, keep: Collection[str]) -> list[Resident] | None:
        """Returns the images to drain for this one; None if that does not suffice."""
        planned = drain_order(self._by_digest.values(), keep)
        return self._until_fits(shape_of(header), planned)

    def _until_fits(
        self, parts: Sequence[Shape], evictable: Iterable[Resident]
    ) -> list[Resident] | None:
        """Returns the first of `evictable` whose eviction makes room; None if all do not."""
        planned, victims = self.extents.copy(), list[Resident]()
        candidates = iter(evictable)
        while True:
            # `planned` changes only when it fits, and then it has served its purpose.
            has_row = bool(self._free_slots or victims)
            if has_row and planned.allocate(parts) is not None:
                return victims
            victim = next(candidates, None)
            if victim is None:
                return None
            planned.free(victim.extents)
            victims.append(victim)

    def eviction_candidates(self, keep: Collection[str]) -> set[str] | None:
        """Returns the images that might be evicted for one more; None while any image known here
        would fit without."""
        largest_bytes = max((_largest_part(r.header) for r in self.residents()), default=0)
        if len(self) < self.max_images and self.extents.least_free_bytes >= largest_bytes:
            return None
        return {r.digest for r in self._by_digest.values() if can_evict(r, keep)}

    def remove(self, digest: str) -> Resident:
        """Frees the image's row and bytes; nothing may be using it."""
        resident = self._by_digest.pop(digest)
        assert resident.users == 0, "freed while in use"
        self.pins.forget(digest)
        self.extents.free(resident.extents)
        self._free_slots.append(resident.slot)
        return resident

    def acquire(self, digest: str, now_time_s: float) -> Resident:
        """Adds a user to a ready image, which also makes it the most recently used."""
        resident = self._by_digest[digest]
        assert resident.ready
        resident.users += 1
        resident.last_used_time_s = now_time_s
        self._by_digest.move_to_end(digest)
        return resident

    def release(self, digest: str) -> Resident:
        resident = self._by_digest[digest]
        assert resident.users > 0
        resident.users -= 1
        self._put_superseded_first(resident)
        return resident

    def set_superseded(self, digest: str, is_superseded: bool) -> None:
        """Makes an image, here or not, the first to be evicted once nothing uses it; or one like
        any other, as if it had just been used. The caller bounds how many are superseded at a
        time."""
        resident = self._by_digest.get(digest)
        if is_superseded:
            self._superseded.add(digest)
            if resident is not None:
                self._put_superseded_first(resident)
        elif digest in self._superseded:
            self._superseded.discard(digest)
            if resident is not None:  # it stands before others that still are superseded
                self._by_digest.move_to_end(digest)

    def _put_superseded_first(self, resident: Resident) -> None:
        if resident.digest in self._superseded and not resident.users:
            self._by_digest.move_to_end(resident.digest, last=False)

    def pin(self, digest: str, account: str = "") -> Resident:
        """See Pins.pin."""
        resident = self._by_digest[digest]
        self.pins.pin(resident, account)
        return resident

    def unpin(self, digest: str, account: str = "") -> Resident:
        """See Pins.unpin."""
        resident = self._by_digest[digest]
        self.pins.unpin(resident, account)
        return resident

    def check_integrity(self) -> None:
        """Asserts that rows and bytes are all accounted for, each once."""
        used = [extent for r in self._by_digest.values() for extent in r.extents]
        self.extents.check_integrity(used)
        slots = [r.slot for r in self._by_digest.values()] + self._free_slots
        assert sorted(slots) == list(range(self.max_images)), "a row is lost or held twice"
        assert self.pins.digests == {r.digest for r in self._by_digest.values() if r.pinned}
        for digest, resident in self._by_digest.items():
            assert resident.digest == digest
            assert resident.users >= 0
            assert resident.num_bytes == align(resident.header.total_bytes)


def _largest_part(header: ImageHeader) -> int:
    """Returns the bytes of an image in the stage that has the most of it."""
    return max(align(part.total_bytes) for part in parts_of(header))


def inadmissible_reason(
    header: ImageHeader, max_rank: int, device: Slots, host: Slots | None
) -> str | None:
    """Returns why this image is too large for one of the tiers that it would pass through, and the
    remedy, in words that follow "has"."""
    if header.rank > max_rank:
        return f"rank {header.rank}, above --max-rank {max_rank}"
    for slots, setting in ((device, "--adapter-memory"), (host, "--host-memory")):
        if slots is None or slots.pins.admits(header):
            continue
        num_bytes, capacity = _largest_part(header), slots.extents.stage_capacity
        size = f"an image of {num_bytes:,} bytes"
        if header is not parts_of(header)[0]:
            size += " in a stage"
        if num_bytes > capacity:
            return f"{size}, more than {setting} {capacity:,} holds: raise it"
        return f"{size}, and pinned adapters leave less of {setting}: unpin others, or raise it"
    return None
