"""Compiling ahead: images are made before anybody pulls them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Executor

from adapter_store.catalog.catalog import Catalog
from adapter_store.core import ImageKey
from adapter_store.images.cache import Images
from servicekit.telemetry import spans
from servicekit.telemetry.spans import OpenSpan

logger = logging.getLogger(__name__)

PAGE_DIGESTS = 500


class Ahead:
    """Lives on the event loop. Everything wanted is made in turn, `num_workers` at a time. Where
    `only_pinned`, what names point to is left to other replicas."""

    def __init__(
        self,
        catalog: Catalog,
        images: Images,
        executor: Executor,
        num_workers: int,
        *,
        only_pinned: bool = False,
    ) -> None:
        self._only_pinned = only_pinned
        self._catalog = catalog
        self._images = images
        self._executor = executor
        # Scans wait when the workers are busy, so what is queued stays small.
        self._keys: asyncio.Queue[tuple[ImageKey, OpenSpan | None]] = asyncio.Queue()
        self._scans: asyncio.Queue[str] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._make()) for _ in range(num_workers)]
        self._tasks.append(asyncio.create_task(self._scan()))

    @property
    def num_queued(self) -> int:
        """Images that are wanted, and nobody has begun with."""
        return self._keys.qsize()

    def want_pinned(self, keys: Iterable[ImageKey]) -> None:
        """What is made for them is a part of what the caller does."""
        for key in keys:
            self._keys.put_nowait((key, spans.current()))

    def want_current(self, keys: Iterable[ImageKey]) -> None:
        """As `want_pinned`, of what names point to."""
        if not self._only_pinned:
            self.want_pinned(keys)

    def want_layout(self, layout_id: str) -> None:
        """Everything that names point to now and that this layout's base model serves."""
        if not self._only_pinned:
            self._scans.put_nowait(layout_id)

    async def idle(self) -> None:
        """Returns when all that was wanted so far is made, or has failed."""
        await self._scans.join()
        await self._keys.join()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _make(self) -> None:
        while True:
            key, span = await self._keys.get()
            try:
                with spans.use_span(span):
                    await self._images.prepare(key)
            finally:
                self._keys.task_done()

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            layout_id = await self._scans.get()
            try:
                digest = ""
                while digests := await loop.run_in_executor(
                    self._executor, self._catalog.unsettled, layout_id, digest, PAGE_DIGESTS
                ):
                    self.want_current(ImageKey(digest, layout_id) for digest in digests)
                    digest = digests[-1]
                    await self._keys.join()
            except Exception:
                logger.exception("looking for images to compile ahead failed")
            finally:
                self._scans.task_done()
