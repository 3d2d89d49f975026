"""Compiles images before they are pulled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Executor

from adapter_store.catalog.images import ImageStates
from adapter_store.catalog.layouts import Layouts
from adapter_store.core import ImageKey
from adapter_store.images.tiers.cache import ImageCache
from servicekit.telemetry import spans
from servicekit.telemetry.spans import OpenSpan

logger = logging.getLogger(__name__)

PAGE_DIGESTS = 500


class Precompiler:
    """Compiles queued images, in order, `num_workers` images at a time. Lives on the event loop.

    With `only_pinned`, current versions are left to other replicas, and to pulls: only whether new
    ones fit is recorded.
    """

    def __init__(
        self,
        layouts: Layouts,
        states: ImageStates,
        images: ImageCache,
        executor: Executor,
        num_workers: int,
        *,
        only_pinned: bool = False,
    ) -> None:
        self._only_pinned = only_pinned
        self._layouts = layouts
        self._states = states
        self._images = images
        self._executor = executor
        # Scans wait while the workers are busy, so the queue stays short.
        self._keys: asyncio.Queue[tuple[ImageKey, bool, OpenSpan | None]] = asyncio.Queue()
        self._scans: asyncio.Queue[str] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._work()) for _ in range(num_workers)]
        self._tasks.append(asyncio.create_task(self._scan()))

    @property
    def num_queued(self) -> int:
        """The number of queued images that no worker has started."""
        return self._keys.qsize()

    def queue_pinned(self, keys: Iterable[ImageKey]) -> None:
        """Queues images of pinned versions. Their spans become children of the caller's."""
        self._queue(keys, is_compiled=True)

    def queue_current(self, keys: Iterable[ImageKey]) -> None:
        """Queues images of current versions, which are checked only if only pinned ones are
        compiled here."""
        self._queue(keys, is_compiled=not self._only_pinned)

    def queue_layout(self, layout_id: str) -> None:
        """Queues the images of all current versions that this layout serves, for as long as it has
        a server."""
        if not self._only_pinned:
            self._scans.put_nowait(layout_id)

    async def wait_idle(self) -> None:
        """Returns when everything queued so far is compiled, or has failed."""
        await self._scans.join()
        await self._keys.join()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _queue(self, keys: Iterable[ImageKey], *, is_compiled: bool) -> None:
        for key in keys:
            self._keys.put_nowait((key, is_compiled, spans.current()))

    async def _work(self) -> None:
        while True:
            key, is_compiled, span = await self._keys.get()
            try:
                with spans.use_span(span):
                    await (self._images.precompile if is_compiled else self._images.check)(key)
            finally:
                self._keys.task_done()

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            layout_id = await self._scans.get()
            try:
                digest = ""
                while digests := await loop.run_in_executor(
                    self._executor, self._unfinished, layout_id, digest
                ):
                    self.queue_current(ImageKey(digest, layout_id) for digest in digests)
                    digest = digests[-1]
                    await self._keys.join()
            except Exception:
                logger.exception("scanning for images to precompile failed")
            finally:
                self._scans.task_done()

    def _unfinished(self, layout_id: str, after_digest: str) -> list[str]:
        """Returns a page of digests to compile; none if the layout has no server any more."""
        if layout_id not in self._layouts.served():
            return []
        return self._states.unfinished(layout_id, after_digest, PAGE_DIGESTS)
