"""The memory tier: images by bytes, the least recently used first out, and room for new ones.

Every buffer is accounted from the moment it is allocated until it is freed. What cannot leave
(being made, read by a stream, pinned) may exceed the capacity by a margin and no more: whoever
wants to make a further image waits for room, pulls before work ahead.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from adapter_store.core import ImageKey
from adapter_store.images.buffers import BufferPool
from adapter_store.images.disk_tier import Removal, TierCounts
from adapter_store.images.partial_image import GrowingImage
from adapter_store.images.plan import ImagePlan
from adapter_store.images.worker_pool import Priority

MARGIN_BYTES = 32 << 20
SPARE_BYTES = 256 << 20
"""Kept of what came free: an image that takes the place of one of its size finds it all there."""


@dataclass(eq=False, slots=True)
class MemoryEntry:
    """An image in memory. `holds` counts its maker and the streams that read it: as long, it
    takes its bytes."""

    key: ImageKey
    image: GrowingImage
    holds: int = 0
    is_cached: bool = False
    is_freed: bool = False
    """Its buffer is another image's: look for the image anew."""

    @property
    def num_bytes(self) -> int:
        return self.image.plan.total_bytes


class Room:
    """A wish for the buffer of a new image; `granted` gives it."""

    def __init__(self, num_bytes: int, priority: Priority) -> None:
        self.num_bytes = num_bytes
        self.priority = priority
        self.granted: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()


class MemoryTier:
    """Used from one thread. Held and pinned images never leave."""

    def __init__(self, capacity_bytes: int, is_pinned: Callable[[ImageKey], bool]) -> None:
        self.counts = TierCounts(capacity_bytes)
        self._margin_bytes = min(MARGIN_BYTES, capacity_bytes // 8)
        self._is_pinned = is_pinned
        self._entries: OrderedDict[ImageKey, MemoryEntry] = OrderedDict()
        self._pool = BufferPool(min(SPARE_BYTES, capacity_bytes))
        self._held_bytes = 0
        """Of entries with holds, and of room granted and not taken yet."""
        self._rooms: list[tuple[Priority, int, Room]] = []
        self._order = itertools.count()

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._entries

    def find(self, key: ImageKey) -> MemoryEntry | None:
        """The image, now the most recently used; counts a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._entries.move_to_end(key)
        return entry

    # Making images

    def ask_room(self, num_bytes: int, priority: Priority) -> Room:
        """Asks for the bytes of a new image. When `granted`, they are accounted: go on to `start`,
        or `return_room`."""
        room = Room(num_bytes, priority)
        self._push(room)
        self._grant()
        return room

    def hurry(self, room: Room) -> None:
        """A pull waits for this room now."""
        if not room.granted.done() and room.priority is not Priority.PULL:
            room.priority = Priority.PULL
            self._push(room)
            self._grant()

    def return_room(self, room: Room) -> None:
        """The room is not wanted any more, granted or not."""
        if not room.granted.cancel() and not room.granted.cancelled():
            self._held_bytes -= room.num_bytes
            self._release(room.granted.result())
        self._grant()

    def start(self, key: ImageKey, plan: ImagePlan, room: Room) -> MemoryEntry:
        """The entry of an image about to be made in granted room, held by its maker."""
        assert room.num_bytes == plan.total_bytes
        self.counts.images += 1
        return MemoryEntry(key, GrowingImage(plan, room.granted.result()), holds=1)

    def put(self, entry: MemoryEntry) -> None:
        """Keeps an image that somebody holds also afterwards."""
        assert entry.holds
        self.drop(entry.key)
        self._entries[entry.key] = entry
        entry.is_cached = True

    def has_room(self, num_bytes: int) -> bool:
        """Whether the image fits without another one leaving."""
        return self.counts.used_bytes + num_bytes <= self.counts.capacity_bytes

    def lacks_spare(self, num_bytes: int) -> bool:
        """Whether the next image of this size would have to wait for new pages, although there is
        room for them."""
        return (
            num_bytes <= SPARE_BYTES // 4
            and not self._pool.has(num_bytes)
            and self.has_room(self._pool.spare_bytes + num_bytes)
        )

    def add_spare(self, buffer: torch.Tensor) -> None:
        """Keeps a buffer for the next image of its size, if there still is room for it."""
        self._pool.give(buffer)
        self._pool.shrink(self.counts.capacity_bytes - self.counts.used_bytes)

    # Reading images

    @contextmanager
    def hold(self, entry: MemoryEntry) -> Iterator[MemoryEntry]:
        """Keeps the image's bytes while the context lasts, whatever happens to the tier."""
        assert not entry.is_freed
        if entry.holds == 0:
            self._held_bytes += entry.num_bytes
        entry.holds += 1
        try:
            yield entry
        finally:
            self.let_go(entry)

    def let_go(self, entry: MemoryEntry) -> None:
        """Ends a hold."""
        entry.holds -= 1
        if entry.holds == 0:
            self._held_bytes -= entry.num_bytes
            if not entry.is_cached:
                self._free(entry)
        self.shrink()

    def drop(self, key: ImageKey) -> None:
        """Forgets an image; its bytes are free when nobody holds it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.is_cached = False
            if entry.holds == 0:
                self._free(entry)

    def drop_digests(self, digests: Set[str]) -> None:
        """In one pass: whoever collects may have thousands, on the event loop."""
        self._drop_all(lambda key: key.digest in digests, Removal.DELETED)

    def drop_layouts(self, layout_ids: Set[str]) -> None:
        self._drop_all(lambda key: key.layout_id in layout_ids, Removal.UNUSED)

    def shrink(self) -> None:
        """Lets the least recently used go until capacity is met, and gives away what is free."""
        self._make_room(0)
        self._grant()

    def check_integrity(self) -> None:
        """Asserts that the accounts equal what is there; call it while nothing is held."""
        assert self.counts.images == len(self._entries)
        assert self.counts.used_bytes == sum(e.num_bytes for e in self._entries.values())
        assert all(e.is_cached and e.holds == 0 for e in self._entries.values())
        assert self._held_bytes == 0
        assert not any(self._is_waiting(entry) for entry in self._rooms)

    # Room

    def _push(self, room: Room) -> None:
        heapq.heappush(self._rooms, (room.priority, next(self._order), room))

    def _is_waiting(self, entry: tuple[Priority, int, Room]) -> bool:
        priority, _, room = entry
        return not room.granted.done() and priority is room.priority

    def _grant(self) -> None:
        """Gives room to those who wait, in their order."""
        while self._rooms:
            room = self._rooms[0][2]
            if self._is_waiting(self._rooms[0]):
                if not self._can_make_room(room.num_bytes):
                    return
                room.granted.set_result(self._allocate(room.num_bytes))
            heapq.heappop(self._rooms)

    def _can_make_room(self, num_bytes: int) -> bool:
        """Whether what cannot leave stays within bounds. One image always may be made, or those
        that are too large, or come when all is pinned, would wait for ever."""
        if self._held_bytes == 0:
            return True
        staying = self._held_bytes + num_bytes
        limit = self.counts.capacity_bytes + self._margin_bytes
        if staying > limit:
            return False
        pinned = sum(e.num_bytes for k, e in self._entries.items() if self._is_idle_pinned(k, e))
        return staying + pinned <= limit

    def _is_idle_pinned(self, key: ImageKey, entry: MemoryEntry) -> bool:
        return entry.holds == 0 and self._is_pinned(key)

    def _drop_all(self, is_meant: Callable[[ImageKey], bool], reason: Removal) -> None:
        for key in [key for key in self._entries if is_meant(key)]:
            self.drop(key)
            self.counts.removals[reason] += 1
        self._grant()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self._make_room(num_bytes)
        buffer = self._pool.take(num_bytes)
        self._held_bytes += num_bytes
        self.counts.used_bytes += num_bytes
        self._pool.shrink(self.counts.capacity_bytes - self.counts.used_bytes)
        return buffer

    def _make_room(self, num_bytes: int) -> None:
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
        self._release(entry.image.buffer)

    def _release(self, buffer: torch.Tensor) -> None:
        self.counts.used_bytes -= buffer.numel()
        self.add_spare(buffer)
