"""The live tail of the catalog's history, for any number of watchers.

Nothing is queued per watcher: each holds only its position, and reads on from the recent events in
memory, or from the catalog when it has fallen behind. So a slow watcher costs nothing, and one that
falls behind the retention is told to list again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from datetime import UTC, datetime

from adapter_store.catalog.catalog import Catalog
from adapter_store.core import AdapterEvent, EventKind, Tenants
from servicekit.errors import Draining

RECENT_EVENTS = 1024
BATCH_EVENTS = 256


class Watch:
    """Lives on one event loop. `catalog` tells it of changes from any thread."""

    def __init__(self, catalog: Catalog, executor: Executor, bookmark_seconds: float) -> None:
        self._catalog = catalog
        self._executor = executor
        self._bookmark_seconds = bookmark_seconds
        self._loop = asyncio.get_running_loop()
        self._recent: deque[AdapterEvent] = deque(maxlen=RECENT_EVENTS)
        self._told = 0
        self._changed = asyncio.Event()
        self._closed = False
        self.num_watchers = 0
        catalog.on_change(self._tell)
        self._revision = catalog.revision()

    def close(self) -> None:
        """Ends every watcher with Draining."""
        self._closed = True
        self._wake()

    async def follow(
        self, since_revision: int, tenants: Tenants = None
    ) -> AsyncGenerator[AdapterEvent]:
        """Events of these tenants after `since_revision`, then each as it happens, with bookmarks
        in silence, and where others' events were passed over: the caller is never behind. While we
        do not know what others change there are none: the caller is not to believe us.

        Raises RevisionTooOld, at the start or when the caller is too slow, and Draining.
        """
        self.num_watchers += 1
        try:
            position = since_revision
            while True:
                told = position
                for event in await self._read(position):
                    position = event.revision
                    if tenants is None or event.tenant in tenants:
                        yield event
                        told = position
                if told != position:
                    yield _bookmark(position)
                if self._closed:
                    raise Draining("this store is shutting down")
                # A caller may know of a change in another replica before it is known here.
                is_silence = position >= self._revision and not await self._change_from(position)
                if is_silence and self._catalog.is_current:
                    yield _bookmark(position)
        finally:
            self.num_watchers -= 1

    async def _read(self, position: int) -> list[AdapterEvent]:
        if position == self._revision:
            return []
        recent = self._recent
        if recent and recent[0].revision <= position + 1 <= self._revision:
            # Revisions have no gaps: the place in the deque follows from the numbers.
            start = position + 1 - recent[0].revision
            return [recent[i] for i in range(start, min(start + BATCH_EVENTS, len(recent)))]
        return await self._loop.run_in_executor(
            self._executor, self._catalog.events_since, position, BATCH_EVENTS
        )

    async def _change_from(self, position: int) -> bool:
        """Waits until there is something after `position`; False: not within the bookmark time."""
        changed = self._changed
        if self._closed or self._revision > position:
            return True
        try:
            async with asyncio.timeout(self._bookmark_seconds):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self, events: list[AdapterEvent]) -> None:
        """Called by the catalog in commit order, from the writer's thread."""
        try:
            self._loop.call_soon_threadsafe(self._add, events)
        except RuntimeError:
            # The loop has ended; nobody watches any more.
            assert self._loop.is_closed()

    def _add(self, events: list[AdapterEvent]) -> None:
        is_restored = events[0].revision <= self._told
        self._told = events[-1].revision
        if is_restored:
            # The database has been put back to an earlier state: whoever is ahead lists again.
            self._recent.clear()
        elif events[-1].revision <= self._revision:
            return  # known from the start
        if self._recent and events[0].revision != self._recent[-1].revision + 1:
            self._recent.clear()  # what lies between has to be read from the catalog
        self._recent.extend(events)
        self._revision = events[-1].revision
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _bookmark(revision: int) -> AdapterEvent:
    return AdapterEvent(revision, EventKind.BOOKMARK, "", 0, "", datetime.now(UTC))
