"""Renews what servers announce for as long as they watch, and withdraws it when the last of them
has gone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import datetime

from adapter_store.catalog.catalog import Catalog
from adapter_store.errors import CatalogUnavailable
from servicekit.errors import Draining, NotFound

logger = logging.getLogger(__name__)

GONE_AFTER_SECONDS = 3.0
"""How long after its last watch a server counts as gone: one whose connection broke is back
before."""


class Presence:
    """The servers that watch this replica. Calls `on_use` with the layout of what it renews. Lives
    on the event loop."""

    def __init__(self, catalog: Catalog, executor: Executor, on_use: Callable[[str], None]) -> None:
        self._catalog = catalog
        self._executor = executor
        self._on_use = on_use
        self._num_watches: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    @contextmanager
    def watching(self, announcement_id: str) -> Iterator[None]:
        """Counts a server as watching while the context lasts. If it was the announcement's last,
        that is withdrawn a moment later; not if this store stops, and the server stays."""
        leaving = self._leaving.pop(announcement_id, None)
        if leaving is not None:
            leaving.cancel()
        self._num_watches[announcement_id] += 1
        store_stops = False
        try:
            yield
        except Draining:
            store_stops = True
            raise
        finally:
            self._num_watches[announcement_id] -= 1
            if not self._num_watches[announcement_id]:
                del self._num_watches[announcement_id]
                if not store_stops:
                    self._leave(announcement_id)

    async def renew(self, announcement_id: str) -> None:
        """Renews an announcement if that is due. A catalog that does not answer is asked again with
        the next event. Raises NotFound."""
        if not self._catalog.is_renewal_due(announcement_id):
            return
        loop = asyncio.get_running_loop()
        try:
            layout_id = await loop.run_in_executor(
                self._executor, self._catalog.renew, announcement_id
            )
        except CatalogUnavailable:
            logger.warning("an announcement was not renewed: the catalog does not answer")
            return
        if layout_id is None:
            raise NotFound(
                f"announcement_id: no announcement {announcement_id}: register the layout again",
                subject="announcement_id",
            )
        self._on_use(layout_id)

    async def close(self) -> None:
        """Withdraws nothing any more."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def _leave(self, announcement_id: str) -> None:
        last_renewal = self._catalog.last_renewal(announcement_id)
        if last_renewal is not None:
            task = asyncio.create_task(self._withdraw(announcement_id, last_renewal))
            self._leaving[announcement_id] = task

    async def _withdraw(self, announcement_id: str, last_renewal: datetime) -> None:
        await asyncio.sleep(GONE_AFTER_SECONDS)
        loop = asyncio.get_running_loop()
        arguments = (announcement_id, last_renewal)
        try:
            await loop.run_in_executor(self._executor, self._catalog.withdraw, *arguments)
        except CatalogUnavailable:
            logger.warning("an announcement was not withdrawn: it expires")
        if self._leaving.get(announcement_id) is asyncio.current_task():
            del self._leaving[announcement_id]
