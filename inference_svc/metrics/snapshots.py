"""Asks the engine how it is, from the thread of whoever scrapes the metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent import futures
from contextlib import suppress

from inference_svc.core import ANYONE
from inference_svc.frontend.async_engine import Frontend
from inference_svc.metrics.engine import Snapshot
from inference_svc.store.directory import Directory
from servicekit.errors import ServiceError
from servicekit.refs import short_name

ANSWER_SECONDS = 2.0
"""An engine in a longer step is shown as it was at the last scrape, with its age."""
MAX_RESIDENTS = 512
"""Resident adapters that are asked for, beside all on the device: the engine lists them between
two steps."""
MAX_NAMES = 16
"""Names of one adapter."""


class Snapshots:
    """`take` may be called from any thread but the event loop's. At most `max_loras` adapters are
    on the device."""

    def __init__(self, max_loras: int) -> None:
        self._lock = threading.Lock()
        self._asked: futures.Future[None] | None = None
        self._max_residents = max(MAX_RESIDENTS, max_loras)
        self._source: tuple[asyncio.AbstractEventLoop, Frontend, Directory] | None = None
        self._last: Snapshot | None = None

    def follow(self, frontend: Frontend, directory: Directory) -> None:
        """Until then there is nothing to show. Call it on the event loop."""
        self._source = asyncio.get_running_loop(), frontend, directory

    def forget(self) -> None:
        """The engine is about to end: the last snapshot stays."""
        self._source = None

    def take(self) -> Snapshot | None:
        """The last snapshot, as new as the engine lets it be."""
        asked = self._ask()
        if asked is not None:
            done = futures.wait([asked], ANSWER_SECONDS).done
            if done and not asked.cancelled():  # else the server has ended
                asked.result()
        return self._last

    def _ask(self) -> futures.Future[None] | None:
        """Once at a time, however many scrape: an engine that hangs is not to find thousands of
        questions, and one in a long step answers after whoever asked has left."""
        with self._lock:
            source = self._source
            if source is not None and (self._asked is None or self._asked.done()):
                loop, frontend, directory = source
                asking = self._renew(frontend, directory)
                self._asked = asyncio.run_coroutine_threadsafe(asking, loop)
            return self._asked if source is not None else None

    async def _renew(self, frontend: Frontend, directory: Directory) -> None:
        with suppress(ServiceError):  # the engine has failed; the process is about to end
            self._last = await _ask(frontend, directory, self._max_residents)


async def _ask(frontend: Frontend, directory: Directory, max_residents: int) -> Snapshot:
    status, residents = await asyncio.gather(
        frontend.describe(), frontend.list_resident(max_residents)
    )
    digests = {adapter.digest for adapter in residents}
    digests.update(status.running_digests, status.waiting_digests)
    return Snapshot(
        status,
        residents,
        {digest: _labels(directory.names_of(ANYONE, digest, MAX_NAMES)) for digest in digests},
        directory.is_live,
        time.time(),
    )


def _labels(names: list[str]) -> list[str]:
    """As callers write them; a version only where no unversioned name points there."""
    unversioned = [name for name in names if "@" not in name]
    return [short_name(name) for name in unversioned or names]
