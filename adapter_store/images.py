"""Images for pulls: memory, else disk, else compiled; each at most once at a time.

Lives on the event loop. Work runs in a bounded pool of threads, where pulls go before work ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from adapter_store.builder import ImageBuilder, NoRoomAhead
from adapter_store.catalog import ImageKey
from adapter_store.core import Tenants
from adapter_store.errors import StoreError
from adapter_store.image import Image
from adapter_store.tiers import DiskTier, MemoryEntry, MemoryTier, TierCounts
from adapter_store.workers import Priority, Workers

logger = logging.getLogger(__name__)


class Images:
    """The tiers and the builder behind them. `refresh_pinned` says which keys are pinned."""

    def __init__(
        self,
        builder: ImageBuilder,
        disk: DiskTier,
        workers: Workers,
        calls: Executor,
        memory_bytes: int,
    ) -> None:
        self._builder = builder
        self._disk = disk
        self._workers = workers
        self._calls = calls
        self._pinned: frozenset[ImageKey] = frozenset()
        self._memory = MemoryTier(memory_bytes, lambda key: key in self._pinned)
        self._flights: dict[ImageKey, asyncio.Task[MemoryEntry]] = {}

    @property
    def memory_counts(self) -> TierCounts:
        return self._memory.counts

    @property
    def disk_counts(self) -> TierCounts:
        return self._disk.counts

    @asynccontextmanager
    async def hold(self, key: ImageKey, tenants: Tenants = None) -> AsyncIterator[Image]:
        """The image of (digest, layout_id), in memory while the context lasts.

        One that none of these tenants has a record of is not found.

        Raises NotFound, IncompatibleAdapter and CorruptData, as ImageBuilder.build.
        """
        # What is in memory may have been deleted: only the catalog knows.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._calls, self._builder.check, key, tenants)
        entry = self._memory.find(key)
        while entry is None:
            try:
                entry = await self._fly(key, Priority.PULL)
            except NoRoomAhead:  # joined work ahead that gave way; now it is for a pull
                continue
        with self._memory.hold(entry):
            yield entry.image

    async def prepare(self, key: ImageKey) -> None:
        """Makes the image ahead of any pull: on disk, and if pinned also in memory.

        Never takes the place of what pulls have used. What cannot be made is logged, not raised.
        """
        if key in self._memory:
            return
        priority = Priority.PINNED if key in self._pinned else Priority.AHEAD
        try:
            await self._fly(key, priority)
        except NoRoomAhead:
            logger.debug("no free disk space to compile ahead", extra={"digest": key[0]})
        except StoreError as error:
            logger.info("not compiled ahead", extra={"digest": key[0], "why": str(error)})
        except Exception:
            logger.exception("compiling ahead failed", extra={"digest": key[0]})

    def refresh_pinned(self, pinned: Iterable[ImageKey]) -> list[ImageKey]:
        """Takes over what is pinned now; gives the pinned keys that are not in memory."""
        self._pinned = frozenset(pinned)
        self._memory.shrink()
        return [key for key in self._pinned if key not in self._memory]

    def forget(self, digest: str) -> None:
        """Drops a collected digest's images from memory."""
        self._memory.drop_digest(digest)

    def check_integrity(self) -> None:
        """Asserts that the accounts are right; call it while nothing is held or under way."""
        assert not self._flights
        self._memory.check_integrity()

    async def _fly(self, key: ImageKey, priority: Priority) -> MemoryEntry:
        """Joins the work on this image, or starts it. A caller that goes away leaves it flying."""
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(self._make(key, priority))
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._land(key, done))
        elif priority is Priority.PULL:
            self._workers.hurry(key)
        return await asyncio.shield(flight)

    async def _make(self, key: ImageKey, priority: Priority) -> MemoryEntry:
        ahead = priority is Priority.AHEAD
        image = await self._workers.run(
            key, priority, lambda: self._builder.build(key, ahead=ahead)
        )
        entry = MemoryEntry(key, image)
        if not ahead or self._memory.has_room(entry.num_bytes):
            self._memory.put(entry)
        return entry

    def _land(self, key: ImageKey, flight: asyncio.Task[MemoryEntry]) -> None:
        del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # marks it as seen: those who waited may all have gone
