"""Which images lie in one memory: rows, extents, pins, users, least-recently-used eviction.

Plain bookkeeping without tensors. The arena has one `Slots` whose rows are the rows of the
table; the host tier has another.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from inference_svc.adapters.extents import Extent, ExtentAllocator, round_up
from inference_svc.adapters.image_source import ImageHeader
from inference_svc.errors import NoRoom


class EvictionReason(enum.Enum):
    """What an image left for: one that is asked for, by a request that waited for long or by any,
    or one that may be; or an operator said so."""

    REQUEST = "request"
    AGED = "aged"
    PREFETCH = "prefetch"
    UNLOAD = "unload"


@dataclass(eq=False, slots=True)
class Resident:
    """One image in this memory. `ready` once its bytes are whole and verified.

    `users` counts the running sequences (or copies) that read it.
    """

    header: ImageHeader
    slot: int
    extents: tuple[Extent, ...]
    rank: int
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


def target_cuts(header: ImageHeader) -> list[int]:
    """The image offsets at which a target starts, where an image may be cut."""
    cuts: list[int] = []
    previous = -1
    for segment in header.segments:
        if segment.target != previous:
            cuts.append(segment.offset)
            previous = segment.target
    return cuts


@dataclass(frozen=True, slots=True)
class Shape:
    """An image as an allocator sees it: its size, and where it may be cut."""

    num_bytes: int
    cuts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, header: ImageHeader) -> Shape:
        return cls(header.total_bytes, tuple(target_cuts(header)))


class Slots:
    """Images in a memory of `capacity` bytes, at most `max_images` of them.

    `largest` is the shape of the largest admissible image: pins must always leave room for it, so
    that they can never stop others from loading.
    """

    def __init__(
        self,
        capacity: int,
        max_images: int,
        largest: Shape | None = None,
        on_evict: Callable[[Resident], None] = lambda resident: None,
    ) -> None:
        self.extents = ExtentAllocator(capacity)
        self.max_images = max_images
        self.largest = largest
        self.on_evict = on_evict
        self._by_digest: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._free_slots = list(range(max_images - 1, -1, -1))
        self.evictions: Counter[EvictionReason] = Counter()
        self._pinned: dict[str, Resident] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def get(self, digest: str) -> Resident | None:
        return self._by_digest.get(digest)

    def residents(self) -> list[Resident]:
        return list(self._by_digest.values())

    def last_used_first(self) -> Iterator[Resident]:
        """To be read before anything changes."""
        return reversed(self._by_digest.values())

    @property
    def num_evictions(self) -> int:
        return self.evictions.total()

    @property
    def pinned_bytes(self) -> int:
        return sum(resident.num_bytes for resident in self._pinned.values())

    @property
    def capacity(self) -> int:
        return self.extents.capacity

    @property
    def used_bytes(self) -> int:
        return self.extents.capacity - self.extents.free_bytes

    def admits(self, header: ImageHeader) -> bool:
        """Whether the image can be loaded once nothing runs: beside what is pinned."""
        return self._beside_pins().allocate(header.total_bytes, target_cuts(header)) is not None

    def _beside_pins(self, *more: Resident) -> ExtentAllocator:
        """The memory with only pinned images in it, and these."""
        pinned = (resident.extents for resident in (*self._pinned.values(), *more))
        return ExtentAllocator.around(self.capacity, chain.from_iterable(pinned))

    def reserve(
        self,
        header: ImageHeader,
        keep: Collection[str] = (),
        wanted: Collection[str] = (),
        reason: EvictionReason = EvictionReason.REQUEST,
    ) -> Resident | None:
        """Room for an image, evicting as few as needed: what is not `wanted` first, then the least
        recently used; never those in `keep`. None, and nothing evicted, when that is not enough.
        """
        assert header.digest not in self._by_digest, "reserved twice"
        cuts = target_cuts(header)
        victims = self._victims(header.total_bytes, cuts, keep, wanted)
        if victims is None:
            return None
        for victim in victims:
            self.evictions[reason] += 1
            self.remove(victim.digest)
            self.on_evict(victim)
        extents = self.extents.allocate(header.total_bytes, cuts)
        assert extents is not None, "planned, and does not fit"
        resident = Resident(header, self._free_slots.pop(), extents, header.rank)
        self._by_digest[header.digest] = resident
        return resident

    def to_drain(self, header: ImageHeader, keep: Collection[str]) -> list[Resident] | None:
        """The images that must be given up for room for this one, those of few users first. None
        if that makes no room, either."""
        idle_first = sorted(self._by_digest.values(), key=lambda resident: resident.users)
        planned = [r for r in idle_first if r.ready and not r.pinned and r.digest not in keep]
        return self._until_room(header.total_bytes, target_cuts(header), planned)

    def _victims(
        self, num_bytes: int, cuts: list[int], keep: Collection[str], wanted: Collection[str]
    ) -> list[Resident] | None:
        """The images whose eviction makes room; None if no eviction does. Of thousands only those
        are looked at that come first."""
        evictable = (
            resident
            for is_wanted in (False, True)
            for resident in self._by_digest.values()
            if (resident.digest in wanted) == is_wanted and self.may_evict(resident, keep)
        )
        return self._until_room(num_bytes, cuts, evictable)

    def _until_room(
        self, num_bytes: int, cuts: list[int], evictable: Iterable[Resident]
    ) -> list[Resident] | None:
        """The first of `evictable` whose eviction makes room; None if that of all does not."""
        planned, victims = self.extents.copy(), list[Resident]()
        candidates = iter(evictable)
        while True:
            # `planned` changes only when it fits, and then it has served its purpose.
            has_row = bool(self._free_slots or victims)
            if has_row and planned.allocate(num_bytes, cuts) is not None:
                return victims
            victim = next(candidates, None)
            if victim is None:
                return None
            planned.free(victim.extents)
            victims.append(victim)

    def may_leave(self, keep: Collection[str]) -> set[str] | None:
        """What might be evicted for one more image; None while there is room for any that is known
        here."""
        largest_bytes = max((r.num_bytes for r in self._by_digest.values()), default=0)
        if len(self) < self.max_images and self.extents.free_bytes >= largest_bytes:
            return None
        return {r.digest for r in self._by_digest.values() if self.may_evict(r, keep)}

    def may_evict(self, resident: Resident, keep: Collection[str]) -> bool:
        if resident.pinned or resident.users or not resident.ready:
            return False
        return resident.digest not in keep

    def remove(self, digest: str) -> Resident:
        """Frees the image's row and bytes; nobody may be using it."""
        resident = self._by_digest.pop(digest)
        assert resident.users == 0, "freed while in use"
        self._pinned.pop(digest, None)
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

    def pin(self, digest: str) -> Resident:
        """Protects from eviction. Raises NoRoom when pins could stop others from loading."""
        resident = self._by_digest[digest]
        if resident.pinned:
            return resident
        if len(self._pinned) + 1 >= self.max_images:
            raise NoRoom(
                f"pinning would take the last of {self.max_images} rows; raise max_loras or "
                "unpin another adapter",
                subject="max_loras",
            )
        left = self._beside_pins(resident)
        if self.largest and left.allocate(self.largest.num_bytes, self.largest.cuts) is None:
            raise NoRoom(
                f"pinning {resident.num_bytes} bytes would leave no room for the largest "
                f"admissible adapter ({self.largest.num_bytes} bytes) in {self.capacity} bytes; "
                "raise adapter_memory or unpin another adapter",
                subject="adapter_memory",
            )
        resident.pinned = True
        self._pinned[digest] = resident
        return resident

    def unpin(self, digest: str) -> Resident:
        resident = self._by_digest[digest]
        resident.pinned = False
        self._pinned.pop(digest, None)
        return resident

    def check_integrity(self) -> None:
        """Asserts that rows and bytes are all accounted for, each once."""
        used = [extent for r in self._by_digest.values() for extent in r.extents]
        self.extents.check_integrity(used)
        slots = [r.slot for r in self._by_digest.values()] + self._free_slots
        assert sorted(slots) == list(range(self.max_images)), "a row is lost or held twice"
        assert set(self._pinned) == {r.digest for r in self._by_digest.values() if r.pinned}
        for digest, resident in self._by_digest.items():
            assert resident.digest == digest
            assert resident.users >= 0
            assert resident.num_bytes == round_up(resident.header.total_bytes)


def why_inadmissible(header: ImageHeader, max_rank: int, memories: Iterable[Slots]) -> str | None:
    """What of this image is too much for one of the memories that it would pass through."""
    if header.rank > max_rank:
        return f"rank {header.rank}, above max_lora_rank {max_rank}"
    if not all(slots.admits(header) for slots in memories):
        return f"{header.total_bytes} bytes, more than the memory for adapters can give"
    return None
