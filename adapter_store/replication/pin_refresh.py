"""Updates a replica's pins after changes that other replicas made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from adapter_store.catalog.history import History
from adapter_store.core import AdapterEvent
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class PinRefresher:
    """Calls `refresh` after changes, once for any number of them, one call at a time. Lives on the
    event loop."""

    def __init__(self, history: History, refresh: Callable[[], Awaitable[None]]) -> None:
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        history.on_change(self._on_change)

    def close(self) -> None:
        self._task.cancel()

    def _on_change(self, _events: list[AdapterEvent]) -> None:
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
                logger.exception("refreshing pins failed; trying again")
            await asyncio.sleep(RETRY_SECONDS)
            self._changed.set()
