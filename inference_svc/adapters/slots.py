"""Which images lie in one memory: rows, extents, pins, users, least-recently-used eviction.

Plain bookkeeping without tensors. The arena has one `Slots` whose rows are the rows of the
table; the host tier has another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from inference_svc.adapters.extents import Extent, ExtentAllocator, round_up
from inference_svc.adapters.store import ImageHeader
from inference_svc.errors import NoRoom


@dataclass(eq=False, slots=True)
class Resident:
    """One image in this memory. `ready` once its bytes are whole and verified.

    `users` counts the running sequences (or copies) that read it.
    """

    header: ImageHeader
    slot: int
    extents: tuple[Extent, ...]
    ready: bool = False
    users: int = 0
    pinned: bool = False
    draining: bool = False
    last_used_time_s: float = 0.0
    load_seconds: float = 0.0

    @property
    def digest(self) -> str:
        return self.header.digest

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents)

    @property
    def rank(self) -> int:
        return max(segment.rank for segment in self.header.segments)


def target_cuts(header: ImageHeader) -> list[int]:
    """The image offsets at which a target starts, where an image may be cut."""
    cuts: list[int] = []
    previous = -1
    for segment in header.segments:
        if segment.target != previous:
            cuts.append(segment.offset)
            previous = segment.target
    return cuts


class Slots:
    """Images in a memory of `capacity` bytes, at most `max_images` of them.

    `pin_reserve_bytes` is what pins must always leave free: the largest admissible image, so that
    pins can never stop others from loading.
    """

    def __init__(self, capacity: int, max_images: int, pin_reserve_bytes: int = 0) -> None:
        self.extents = ExtentAllocator(capacity)
        self.max_images = max_images
        self.pin_reserve_bytes = min(pin_reserve_bytes, self.extents.capacity)
        self._by_digest: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._free_slots = list(range(max_images - 1, -1, -1))
        self.on_evict: Callable[[Resident], None] = lambda resident: None
        self.num_evictions = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def get(self, digest: str) -> Resident | None:
        return self._by_digest.get(digest)

    def residents(self) -> list[Resident]:
        return list(self._by_digest.values())

    @property
    def capacity(self) -> int:
        return self.extents.capacity

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity - self.extents.free_bytes

    def admits(self, num_bytes: int) -> bool:
        """Whether an image of this size could be loaded once nothing runs."""
        pinned = sum(r.num_bytes for r in self._by_digest.values() if r.pinned)
        return round_up(num_bytes) <= self.extents.capacity - pinned

    def reserve(self, header: ImageHeader, keep: Collection[str] = ()) -> Resident | None:
        """Room for an image, evicting the least recently used as needed, never those in `keep`.

        None when there is none now; nothing is evicted in vain for lack of bytes or rows.
        """
        assert header.digest not in self._by_digest, "reserved twice"
        evictable = [r for r in self._by_digest.values() if self._may_evict(r, keep)]
        if not self._can_fit(header.total_bytes, evictable):
            return None
        cuts = target_cuts(header)
        while True:
            extents = None
            if self._free_slots:
                extents = self.extents.allocate(header.total_bytes, cuts)
            if extents is not None:
                resident = Resident(header, self._free_slots.pop(), extents)
                self._by_digest[header.digest] = resident
                return resident
            if not evictable:
                return None
            self._evict(evictable.pop(0))

    def _may_evict(self, resident: Resident, keep: Collection[str]) -> bool:
        if resident.pinned or resident.users or not resident.ready:
            return False
        return resident.digest not in keep

    def _can_fit(self, num_bytes: int, evictable: list[Resident]) -> bool:
        room = self.extents.free_bytes + sum(r.num_bytes for r in evictable)
        return room >= round_up(num_bytes) and bool(self._free_slots or evictable)

    def _evict(self, resident: Resident) -> None:
        self.num_evictions += 1
        self.remove(resident.digest)
        self.on_evict(resident)

    def remove(self, digest: str) -> Resident:
        """Frees the image's row and bytes; nobody may be using it."""
        resident = self._by_digest.pop(digest)
        assert resident.users == 0, "freed while in use"
        self.extents.free(resident.extents)
        self._free_slots.append(resident.slot)
        return resident

    def acquire(self, digest: str, now_time_s: float) -> Resident:
        """Marks one more user of a ready image, which also makes it the most recently used."""
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
        return resident

    def check_pin(self, num_bytes: int) -> None:
        """Raises NoRoom if pinning an image of this size could stop others from loading."""
        pinned = sum(r.num_bytes for r in self._by_digest.values() if r.pinned)
        room = self.extents.capacity - self.pin_reserve_bytes - pinned
        rows = sum(r.pinned for r in self._by_digest.values())
        if round_up(num_bytes) > room or rows + 1 >= self.max_images:
            raise NoRoom(
                f"pinning {num_bytes} bytes would leave less than the largest admissible adapter "
                f"({self.pin_reserve_bytes} bytes) of {self.extents.capacity} bytes; "
                "raise adapter_memory or unpin another adapter",
                subject="adapter_memory",
            )

    def pin(self, digest: str) -> Resident:
        """Protects from eviction. Raises NoRoom when pins would fill the memory."""
        resident = self._by_digest[digest]
        if not resident.pinned:
            self.check_pin(resident.num_bytes)
            resident.pinned = True
        return resident

    def unpin(self, digest: str) -> Resident:
        resident = self._by_digest[digest]
        resident.pinned = False
        return resident

    def check_integrity(self) -> None:
        """Asserts that rows and bytes are all accounted for, each once."""
        used = [extent for r in self._by_digest.values() for extent in r.extents]
        self.extents.check_integrity(used)
        slots = [r.slot for r in self._by_digest.values()] + self._free_slots
        assert sorted(slots) == list(range(self.max_images)), "a row is lost or held twice"
        for digest, resident in self._by_digest.items():
            assert resident.digest == digest
            assert resident.users >= 0
            assert resident.num_bytes == round_up(resident.header.total_bytes)
