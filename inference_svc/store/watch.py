"""The connection to the store: the layout registered, the directory kept current by the watch."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import StoreUnavailable, notes_of
from inference_svc.store.adapter_resolver import Directory
from inference_svc.store.client import CatalogClient
from inference_svc.store.credentials import StoreAccess
from inference_svc.store.replica_monitor import ReplicaMonitor
from inference_svc.store.replicas import Replicas
from inference_svc.store.types import (
    Announcement,
    CatalogSession,
    HistoryGone,
    NameEvent,
    WatchedCatalog,
)
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

OnLayouts = Callable[[str, tuple[str, ...]], None]

MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.1, 1.0
ANNOUNCE_AGAIN_SECONDS = 300.0
"""How often a server that the store had no place to announce registers its layout again."""
RENEW_SECONDS = 30.0
"""How often the layouts of other ranks are registered again. Without that the store takes a server
for gone after two minutes; the watch renews only the first rank's."""
BEHIND_SECONDS = 2.0
"""Replicas that share a catalog are never further apart; after this long it is another catalog."""


class StoreConnection:
    """The store as the event loop uses it: `catalog` until `close`; from `start` on the watch and
    the monitor of `replicas`, which is shared with the client that pulls images."""

    def __init__(self, addresses: Sequence[str], replicas: Replicas, access: StoreAccess) -> None:
        self.catalog = CatalogClient(replicas, access)
        self._monitor = ReplicaMonitor(replicas, addresses, self.catalog.probe)
        self._monitoring: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._directory: Directory | None = None

    def start(
        self,
        directory: Directory,
        layouts: Sequence[ModelLayout],
        announcement: Announcement,
        on_layouts: OnLayouts,
    ) -> None:
        """Keeps `directory` current from now on. See CatalogWatch for `layouts` and
        `on_layouts`."""
        self._directory = directory
        watch = CatalogWatch(self.catalog, directory, layouts, announcement, on_layouts)
        self._monitoring = asyncio.create_task(self._monitor.run())
        self._watching = asyncio.create_task(watch.run())

    async def leave(self) -> None:
        """Ends the watch, so that the store counts this server as gone. Requests that are still
        being resolved go on as when a watch is interrupted."""
        if self._directory is not None:
            self._directory.has_left = True
        await _cancel(self._watching)

    async def close(self) -> None:
        await self.leave()
        await _cancel(self._monitoring)
        await self.catalog.close()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class CatalogWatch:
    """Registers the layouts of all ranks, of which there is at least one. Calls `on_layouts` with
    the first one's id, and the others', when the store accepts them, and again if they change."""

    def __init__(
        self,
        catalog: WatchedCatalog,
        directory: Directory,
        layouts: Sequence[ModelLayout],
        announcement: Announcement,
        on_layouts: OnLayouts,
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._layout, *self._others = layouts
        self._announcement = announcement
        self._on_layouts = on_layouts
        self._knows_history = False
        self._is_down = False
        self._source = ""
        self._avoid: frozenset[str] = frozenset()
        self._behind_since_s: float | None = None

    async def run(self) -> None:
        """Runs until it is cancelled. Every connection registers the layout: the store may be
        another one now."""
        delay_s = MIN_DELAY_SECONDS
        while True:
            try:
                async for event in self._connect():
                    self._directory.apply(event)
                    self._is_down, delay_s = False, MIN_DELAY_SECONDS
            except HistoryGone:
                self._knows_history = False
            except ServiceError as error:
                self._log_outage(error)
            except Exception:
                # The base model is served also while the store fails.
                logger.exception("the connection to the store failed")
            finally:
                self._directory.watch_lost()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, MAX_DELAY_SECONDS)

    def _log_outage(self, error: ServiceError) -> None:
        """Logs once per outage."""
        if not self._is_down:
            notes = notes_of(error)
            logger.warning("no connection to the store at %s: %s %s", self._source, error, notes)
        self._is_down = True

    async def _connect(self) -> AsyncIterator[NameEvent]:
        """Yields a watch's events. All calls go to one replica: its revision is its watch's."""
        session = await self._catalog.connect(self._avoid)
        self._source = session.source
        layout_id, announcement_id = await session.register_layout(self._layout, self._announcement)
        others = await self._register_others(session, announcement_id)
        if layout_id != self._directory.layout_id:
            logger.info("the store accepted layout %s", layout_id)
            self._directory.layout_id = layout_id
            self._on_layouts(layout_id, others)
        if not announcement_id:
            logger.warning(
                "the store does not announce this server: too many of the same layout announce "
                "different aliases or ranks, or it is of an earlier release"
            )
        revision = await session.get_revision()
        if revision < self._directory.revision:
            self._check_behind(session.source, revision)
        if not self._knows_history or revision < self._directory.revision:
            self._directory.reset(revision)
            self._knows_history = True
        self._avoid, self._behind_since_s = frozenset(), None
        self._directory.watch_started(revision)
        registered_s = renewed_s = time.monotonic()
        async for event in session.watch(self._directory.revision, announcement_id):
            now_s = time.monotonic()
            if not announcement_id and now_s - registered_s >= ANNOUNCE_AGAIN_SECONDS:
                registered_s = now_s
                registered = await session.register_layout(self._layout, self._announcement)
                announcement_id = registered.announcement_id
            if now_s - renewed_s >= RENEW_SECONDS:
                renewed_s = now_s
                await self._register_others(session, announcement_id)
            yield event

    async def _register_others(self, session: CatalogSession, first_id: str) -> tuple[str, ...]:
        """Registers the other ranks' layouts, which no watch keeps; returns their ids. `first_id`
        is the id of the first's announcement."""
        announced = replace(self._announcement, first_announcement_id=first_id)
        found = [
            await session.register_layout(layout, replace(announced, rank_index=index))
            for index, layout in enumerate(self._others, start=1)
        ]
        return tuple(each.layout_id for each in found)

    def _check_behind(self, source: str, revision: int) -> None:
        """Raises StoreUnavailable for a replica that is a moment behind another, so that another
        is tried: nothing is forgotten for it, nor is its past replayed. Returns if that goes on:
        the store then has another history."""
        now_s = time.monotonic()
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        if now_s - self._behind_since_s < BEHIND_SECONDS:
            self._avoid |= {source}
            raise StoreUnavailable(
                f"{source} is at revision {revision}, behind {self._directory.revision}"
            )
        logger.warning("the store went back to revision %d: its history is another", revision)
