"""The memory tier: images within a number of bytes, evicted by least recent use.

Every buffer is accounted from the moment it is allocated until it is freed. Images that cannot be
evicted (being built, read by a stream, pinned) may exceed the capacity by a margin and no more: to
build a further image its bytes are reserved first, which may have to wait, pulls before
precompilation.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from adapter_store.core import ImageKey
from adapter_store.images.partial_image import PartialImage
from adapter_store.images.plan.plan import ImagePlan
from adapter_store.images.tiers.buffers import Buffer, BufferPool
from adapter_store.images.tiers.disk_tier import Removal, TierCounts
from adapter_store.images.tiers.memory_lock import MemoryLock
from adapter_store.images.worker_pool import Priority

MARGIN_BYTES = 32 << 20
SPARE_BYTES = 256 << 20
"""How much freed memory is kept for images of the same size, its pages faulted in."""


@dataclass(eq=False, slots=True)
class MemoryEntry:
    """An image in memory. `holds` counts its builder and the streams that read it: as long as there
    is one, its bytes stay allocated."""

    key: ImageKey
    image: PartialImage
    holds: int = 0
    is_cached: bool = False
    is_freed: bool = False
    """Its buffer belongs to another image now: find the image again."""

    @property
    def num_bytes(self) -> int:
        return self.image.plan.total_bytes


class Reservation:
    """A request for the buffer of a new image, which `granted` returns."""

    def __init__(self, num_bytes: int, priority: Priority) -> None:
        self.num_bytes = num_bytes
        self.priority = priority
        self.granted: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()


class WaitingReservations:
    """Reservations that are not granted yet, by priority, and in the order of their last one."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, int, Reservation]] = []
        self._order = itertools.count()

    def push(self, reservation: Reservation) -> None:
        """Adds a reservation, or gives it its place again after its priority has changed."""
        heapq.heappush(self._heap, (reservation.priority, next(self._order), reservation))

    def first(self) -> Reservation | None:
        """Returns the next one; forgets the ones before it that wait no longer, or elsewhere."""
        while self._heap:
            priority, _, reservation = self._heap[0]
            if not reservation.granted.done() and priority is reservation.priority:
                return reservation
            heapq.heappop(self._heap)
        return None


class MemoryTier:
    """Used from one thread. Held and pinned images are never evicted. Where it `is_shared`, images
    have files that other processes can map."""

    def __init__(
        self,
        capacity_bytes: int,
        is_pinned: Callable[[ImageKey], bool],
        lock: MemoryLock | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.counts = TierCounts(capacity_bytes)
        self._margin_bytes = min(MARGIN_BYTES, capacity_bytes // 8)
        self._is_pinned = is_pinned
        self._entries: OrderedDict[ImageKey, MemoryEntry] = OrderedDict()
        self.pool = BufferPool(min(SPARE_BYTES, capacity_bytes), lock, has_files=is_shared)
        self._held_bytes = 0
        """The bytes of entries with holds, and of reservations granted and not used yet."""
        self._waiting = WaitingReservations()

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._entries

    def find(self, key: ImageKey) -> MemoryEntry | None:
        """Returns the image, which becomes the most recently used; counts a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._entries.move_to_end(key)
        return entry

    # Building images

    def reserve(self, num_bytes: int, priority: Priority) -> Reservation:
        """Requests the bytes of a new image. Once `granted` they are accounted: call `start` or
        `cancel_reservation` next."""
        reservation = Reservation(num_bytes, priority)
        self._waiting.push(reservation)
        self._grant()
        return reservation

    def promote(self, reservation: Reservation) -> None:
        """Raises a reservation to the priority of a pull."""
        if not reservation.granted.done() and reservation.priority is not Priority.PULL:
            reservation.priority = Priority.PULL
            self._waiting.push(reservation)
            self._grant()

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Gives up a reservation, granted or not."""
        if not reservation.granted.cancel() and not reservation.granted.cancelled():
            self._held_bytes -= reservation.num_bytes
            self._recycle(reservation.granted.result())
        self._grant()

    def start(self, key: ImageKey, plan: ImagePlan, reservation: Reservation) -> MemoryEntry:
        """Returns the entry of an image about to be built in reserved bytes, held by its
        builder."""
        assert reservation.num_bytes == plan.total_bytes
        self.counts.images += 1
        return MemoryEntry(key, PartialImage(plan, reservation.granted.result()), holds=1)

    def put(self, entry: MemoryEntry) -> None:
        """Adds a held image to the tier, where it stays after its holds."""
        assert entry.holds
        self.drop(entry.key)
        self._entries[entry.key] = entry
        entry.is_cached = True

    def has_space(self, num_bytes: int) -> bool:
        """Returns whether an image fits without an eviction."""
        return self.counts.used_bytes + num_bytes <= self.counts.capacity_bytes

    def lacks_spare(self, num_bytes: int) -> bool:
        """Returns whether the next image of this size would have to wait for new pages, although
        there is space for them."""
        return (
            num_bytes <= SPARE_BYTES // 4
            and not self.pool.has(num_bytes)
            and self.has_space(self.pool.spare_bytes + num_bytes)
        )

    def add_spare(self, buffer: Buffer) -> None:
        """Keeps a buffer for the next image of its size, if there still is space for it."""
        self.pool.put(buffer)
        self.pool.shrink(self.counts.capacity_bytes - self.counts.used_bytes)

    # Reading images

    @contextmanager
    def hold(self, entry: MemoryEntry) -> Iterator[MemoryEntry]:
        """Keeps the image's bytes allocated while the context lasts, even if it is evicted."""
        assert not entry.is_freed
        if entry.holds == 0:
            self._held_bytes += entry.num_bytes
        entry.holds += 1
        try:
            yield entry
        finally:
            self.release(entry)

    def release(self, entry: MemoryEntry) -> None:
        """Ends a hold."""
        entry.holds -= 1
        if entry.holds == 0:
            self._held_bytes -= entry.num_bytes
            if not entry.is_cached:
                self._free(entry)
        self.shrink()

    def drop(self, key: ImageKey) -> None:
        """Removes an image from the tier; its bytes are freed with its last hold."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.is_cached = False
            if entry.holds == 0:
                self._free(entry)

    def drop_digests(self, digests: Set[str]) -> None:
        """Drops the images of collected digests, in one pass: there may be thousands."""
        self._drop_all(lambda key: key.digest in digests, Removal.DELETED)

    def drop_layouts(self, layout_ids: Set[str]) -> None:
        self._drop_all(lambda key: key.layout_id in layout_ids, Removal.UNUSED)

    def shrink(self) -> None:
        """Evicts the least recently used images until capacity is met, and grants reservations."""
        self._evict_for(0)
        self._grant()

    def check_integrity(self) -> None:
        """Asserts that the accounts match the entries; call it while nothing is held."""
        assert self.counts.images == len(self._entries)
        assert self.counts.used_bytes == sum(e.num_bytes for e in self._entries.values())
        assert all(e.is_cached and e.holds == 0 for e in self._entries.values())
        assert self._held_bytes == 0
        assert self._waiting.first() is None

    def _grant(self) -> None:
        """Grants waiting reservations, in their order, as far as there is space."""
        while (reservation := self._waiting.first()) is not None:
            if not self._can_allocate(reservation.num_bytes):
                return
            reservation.granted.set_result(self._allocate(reservation.num_bytes))

    def _can_allocate(self, num_bytes: int) -> bool:
        """Returns whether the bytes that cannot be evicted stay within bounds. One image may always
        be built: an image that is too large, or comes when all is pinned, would wait for ever."""
        if self._held_bytes == 0:
            return True
        staying = self._held_bytes + num_bytes
        limit = self.counts.capacity_bytes + self._margin_bytes
        if staying > limit:
            return False
        idle = ((key, entry) for key, entry in self._entries.items() if entry.holds == 0)
        pinned = sum(entry.num_bytes for key, entry in idle if self._is_pinned(key))
        return staying + pinned <= limit

    def _drop_all(self, matches: Callable[[ImageKey], bool], reason: Removal) -> None:
        for key in [key for key in self._entries if matches(key)]:
            self.drop(key)
            self.counts.removals[reason] += 1
        self._grant()

    def _allocate(self, num_bytes: int) -> Buffer:
        self._evict_for(num_bytes)
        buffer = self.pool.take(num_bytes)
        self._held_bytes += num_bytes
        self.counts.used_bytes += num_bytes
        self.pool.shrink(self.counts.capacity_bytes - self.counts.used_bytes)
        return buffer

    def _evict_for(self, num_bytes: int) -> None:
        limit = self.counts.capacity_bytes - num_bytes
        if self.counts.used_bytes <= limit:
            return
        for key, entry in list(self._entries.items()):
            if entry.holds == 0 and not self._is_pinned(key):
                self.drop(key)
                self.counts.evictions += 1
                if self.counts.used_bytes <= limit:
                    return

    def _free(self, entry: MemoryEntry) -> None:
        entry.is_freed = True
        self.counts.images -= 1
        self._recycle(entry.image.memory)

    def _recycle(self, buffer: Buffer) -> None:
        self.counts.used_bytes -= buffer.num_bytes
        self.add_spare(buffer)
