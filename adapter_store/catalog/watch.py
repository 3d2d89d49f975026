"""Streams the catalog's history, as it grows, to any number of watchers.

Nothing is queued per watcher: each has only a position, and reads on from the recent events in
memory, or from the catalog when it has fallen behind. So a slow watcher costs no more than the
events that it is being sent, and a watcher that falls behind the retention gets RevisionTooOld and
has to list again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from adapter_store.catalog.history import History
from adapter_store.core import AdapterEvent, EventKind, Tenants
from servicekit.errors import Draining
from servicekit.shares import FairExecutor, Shares

RECENT_EVENTS = 1024
BATCH_EVENTS = 256


class Watch:
    """Lives on one event loop. The catalog calls it with changes from any thread. `places` are for
    its streams."""

    def __init__(
        self, history: History, calls: FairExecutor, bookmark_seconds: float, places: Shares
    ) -> None:
        self._history = history
        self._calls = calls
        self._places = places
        self._bookmark_seconds = bookmark_seconds
        self._loop = asyncio.get_running_loop()
        self._recent: deque[AdapterEvent] = deque(maxlen=RECENT_EVENTS)
        self._last_received = 0
        self._changed = asyncio.Event()
        self._closed = False
        history.on_change(self._on_change)
        self._revision = history.revision()

    @property
    def num_watchers(self) -> int:
        return self._places.used

    def close(self) -> None:
        """Ends every watcher with Draining."""
        self._closed = True
        self._wake()

    async def stream(
        self, since_revision: int, tenants: Tenants = None, account: str = ""
    ) -> AsyncGenerator[AdapterEvent]:
        """Yields these tenants' events after `since_revision`, then each as it happens. Bookmarks
        are sent when there are no events for a while, and where other tenants' events were left
        out, so that the caller's revision stays current. While changes of other replicas are not
        known there are no bookmarks, because the caller's revision may not be current.

        Raises RevisionTooOld, at the start or when the caller is too slow, ShareExceeded if the
        account has too many watches, and Draining.
        """
        with self._places.reserve(account):
            position = since_revision
            while True:
                yielded = position
                for event in await self._read(position, account):
                    position = event.revision
                    if tenants is None or event.tenant in tenants:
                        yield event
                        yielded = position
                if yielded != position:
                    yield _bookmark(position)
                if self._closed:
                    raise Draining("this store is shutting down")
                # A caller may know of another replica's change before it is known here.
                is_idle = position >= self._revision and not await self._change_from(position)
                if is_idle and self._history.is_current:
                    yield _bookmark(position)

    async def _read(self, position: int, account: str) -> list[AdapterEvent]:
        if position == self._revision:
            return []
        recent = self._recent
        if recent and recent[0].revision <= position + 1 <= self._revision:
            # Revisions have no gaps: the place in the deque follows from the numbers.
            start = position + 1 - recent[0].revision
            return [recent[i] for i in range(start, min(start + BATCH_EVENTS, len(recent)))]
        return await self._loop.run_in_executor(
            self._calls.of(account), self._history.since, position, BATCH_EVENTS
        )

    async def _change_from(self, position: int) -> bool:
        """Waits for an event after `position`. Returns False if none comes within the bookmark
        time."""
        changed = self._changed
        if self._closed or self._revision > position:
            return True
        try:
            async with asyncio.timeout(self._bookmark_seconds):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _on_change(self, events: list[AdapterEvent]) -> None:
        """Receives events in commit order, from the writer's thread."""
        try:
            self._loop.call_soon_threadsafe(self._add, events)
        except RuntimeError:
            # The loop has ended, and with it all watchers.
            assert self._loop.is_closed()

    def _add(self, events: list[AdapterEvent]) -> None:
        is_restored = events[0].revision <= self._last_received
        self._last_received = events[-1].revision
        if is_restored:
            # The database was restored to an earlier state: watchers ahead of it list again.
            self._recent.clear()
        elif events[-1].revision <= self._revision:
            return  # known from the start
        if self._recent and events[0].revision != self._recent[-1].revision + 1:
            self._recent.clear()  # the events between have to be read from the catalog
        self._recent.extend(events)
        self._revision = events[-1].revision
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _bookmark(revision: int) -> AdapterEvent:
    return AdapterEvent(revision, EventKind.BOOKMARK, "", 0, "", datetime.now(UTC))
