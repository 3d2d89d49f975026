"""Records that layouts are used, without delaying the pulls that use them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from adapter_store.catalog.layouts import Layouts

logger = logging.getLogger(__name__)


class LayoutUsage:
    """Records uses in the background. Calls `resume` for a layout that is live again. Lives on the
    event loop."""

    def __init__(
        self, layouts: Layouts, executor: Executor, resume: Callable[[str], Awaitable[None]]
    ) -> None:
        self._layouts = layouts
        self._executor = executor
        self._resume = resume
        self._recording: dict[str, asyncio.Task[None]] = {}

    def record(self, layout_id: str) -> None:
        """Starts recording a use, unless a recent one is recorded. Does not block."""
        if layout_id not in self._recording and self._layouts.is_use_due(layout_id):
            self._recording[layout_id] = asyncio.create_task(self._write(layout_id))

    async def wait_idle(self) -> None:
        """Returns when the uses so far are recorded, or have failed to be."""
        await asyncio.gather(*self._recording.values())

    async def _write(self, layout_id: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(self._executor, self._layouts.use, layout_id):
                await self._resume(layout_id)
        except Exception:
            logger.exception("a layout's use was not recorded; its next pull tries again")
        finally:
            del self._recording[layout_id]
