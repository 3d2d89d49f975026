"""Lookups of hosts' names, in threads that nobody waits for: a resolver may take minutes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from inference_svc.pictures.fetching.addresses import Lookup
from inference_svc.pictures.fetching.hosts import Origin

MAX_LOOKUPS = 64
"""How many names are looked up at a time: each takes a thread until the resolver answers."""


class Lookups:
    """Looks names up. All who ask for one origin at a time share one lookup, so that a name whose
    resolver does not answer takes one thread. Lives on one event loop."""

    def __init__(self, look_up: Lookup) -> None:
        self._look_up = look_up
        self._running: dict[Origin, asyncio.Task[Sequence[str]]] = {}
        self._places = asyncio.Semaphore(MAX_LOOKUPS)

    async def find(self, origin: Origin) -> Sequence[str]:
        """Returns the addresses of an origin's name. Raises OSError and UnicodeError."""
        running = self._running.get(origin)
        if running is None:
            running = self._running[origin] = asyncio.create_task(self._find(origin))
            running.add_done_callback(_take_error)
        return await asyncio.shield(running)

    async def _find(self, origin: Origin) -> Sequence[str]:
        try:
            async with self._places:
                return await self._in_thread(origin)
        finally:
            del self._running[origin]

    async def _in_thread(self, origin: Origin) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()

        def end(addresses: Sequence[str], error: BaseException | None) -> None:
            if found.done():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def run() -> None:
            addresses: Sequence[str] = ()
            failure: BaseException | None = None
            try:
                addresses = self._look_up(origin.host, origin.port)
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waited
                loop.call_soon_threadsafe(end, addresses, failure)

        try:
            # A daemon, and no executor's: Python would wait for these before it exits.
            threading.Thread(target=run, name="image_hosts", daemon=True).start()
        except RuntimeError as error:
            raise OSError(str(error)) from None
        return await found


def _take_error(task: asyncio.Task[Sequence[str]]) -> None:
    """Nobody may wait for the error any more: then asyncio would log it."""
    if not task.cancelled():
        task.exception()
