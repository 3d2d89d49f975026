"""What a replica does about changes that others made: brings its pins in line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from adapter_store.catalog.catalog import Catalog
from adapter_store.core import AdapterEvent
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class Followed:
    """Lives on the event loop. Calls `refresh` after changes, however many came meanwhile, one
    call at a time."""

    def __init__(self, catalog: Catalog, refresh: Callable[[], Awaitable[None]]) -> None:
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        catalog.on_change(self._tell)

    def close(self) -> None:
        self._task.cancel()

    def _tell(self, _events: list[AdapterEvent]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            assert self._loop.is_closed()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._refresh()
                continue
            except ServiceError as error:
                logger.warning("pins were not refreshed", extra={"why": str(error)})
            except Exception:
                logger.exception("refreshing pins failed; it will be tried again")
            await asyncio.sleep(RETRY_SECONDS)
            self._changed.set()
