"""Records that layouts are used, beside the pulls that use them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from adapter_store.catalog.catalog import Catalog

logger = logging.getLogger(__name__)


class LayoutUses:
    """Lives on the event loop. Calls `resume` for a layout that comes back after its pause."""

    def __init__(
        self, catalog: Catalog, executor: Executor, resume: Callable[[str], Awaitable[None]]
    ) -> None:
        self._catalog = catalog
        self._executor = executor
        self._resume = resume
        self._recording: dict[str, asyncio.Task[None]] = {}

    def note(self, layout_id: str) -> None:
        """For every pull: it waits for nothing, and most find the use recorded already."""
        if layout_id not in self._recording and self._catalog.is_use_due(layout_id):
            self._recording[layout_id] = asyncio.create_task(self._record(layout_id))

    async def settle(self) -> None:
        """Returns when the uses noted so far are recorded, or could not be."""
        await asyncio.gather(*self._recording.values())

    async def _record(self, layout_id: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(self._executor, self._catalog.use_layout, layout_id):
                await self._resume(layout_id)
        except Exception:
            logger.exception("a layout's use was not recorded; its next pull tries again")
        finally:
            del self._recording[layout_id]
