"""Renews the announcements of servers for as long as they watch, and withdraws each when the last
of them has gone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from adapter_store.catalog.servers import Servers
from servicekit.errors import Draining, NotFound, ServiceError

logger = logging.getLogger(__name__)

GONE_AFTER_SECONDS = 3.0
"""How long after its last watch a server counts as gone: one whose connection broke is back
before."""

RETRY_SECONDS = 5.0
"""After a renewal that failed nothing is renewed for this long: it would be one more write for a
catalog that does not answer, or refuses them."""


class Presence:
    """The servers that watch this replica. Calls `on_use` with the layout of each renewed
    announcement. Lives on the event loop."""

    def __init__(self, servers: Servers, executor: Executor, on_use: Callable[[str], None]) -> None:
        self._servers = servers
        self._executor = executor
        self._on_use = on_use
        self._num_watches: Counter[str] = Counter()
        self._renewing: dict[str, asyncio.Task[bool]] = {}
        self._retry_s = 0.0
        self._is_failing = False
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
        """Renews an announcement if that is due, once for all who wait for it. An announcement that
        cannot be renewed is tried again with a later event. Raises NotFound."""
        renewing = self._renewing.get(announcement_id)
        if renewing is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._retry_s or not self._servers.is_renewal_due(announcement_id):
                return
            renewing = loop.create_task(self._write_renewal(announcement_id))
            self._renewing[announcement_id] = renewing
        if not await asyncio.shield(renewing):
            raise NotFound(
                f"announcement_id: no announcement {announcement_id}: register the layout again",
                subject="announcement_id",
            )

    async def close(self) -> None:
        """Withdraws nothing any more. Returns when the renewals that run have ended."""
        for task in self._leaving.values():
            task.cancel()
        tasks = [*self._leaving.values(), *self._renewing.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_renewal(self, announcement_id: str) -> bool:
        """Returns False for an announcement that is not known."""
        loop = asyncio.get_running_loop()
        try:
            layout_id = await loop.run_in_executor(
                self._executor, self._servers.renew, announcement_id
            )
        except Exception as error:
            self._retry_s = loop.time() + RETRY_SECONDS
            if not self._is_failing:
                logger.warning(
                    "announcements cannot be renewed; trying again",
                    extra={"why": str(error)},
                    exc_info=not isinstance(error, ServiceError),
                )
            self._is_failing = True
            return True
        finally:
            del self._renewing[announcement_id]
        if self._is_failing:
            logger.info("announcements are renewed again")
        self._is_failing = False
        if layout_id is None:
            return False
        self._on_use(layout_id)
        return True

    def _leave(self, announcement_id: str) -> None:
        self._leaving[announcement_id] = asyncio.create_task(self._withdraw(announcement_id))

    async def _withdraw(self, announcement_id: str) -> None:
        """Withdraws an announcement a moment later, once a renewal that runs has ended: it would
        make the servers count as there again."""
        try:
            await asyncio.sleep(GONE_AFTER_SECONDS)
            renewing = self._renewing.get(announcement_id)
            if renewing is not None:
                await asyncio.shield(renewing)
            last_renewal = self._servers.last_renewal(announcement_id)
            if last_renewal is not None:
                loop = asyncio.get_running_loop()
                arguments = (announcement_id, last_renewal)
                await loop.run_in_executor(self._executor, self._servers.withdraw, *arguments)
        except Exception:
            logger.exception("an announcement was not withdrawn: it counts until it expires")
        finally:
            if self._leaving.get(announcement_id) is asyncio.current_task():
                del self._leaving[announcement_id]
