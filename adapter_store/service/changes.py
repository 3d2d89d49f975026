"""Changes of names that run, and the images that follow from them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.core import Recorded
from adapter_store.service.warm_images import StandingImages


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a name that has started. Once its content is here it continues to its end even if
    its caller leaves."""

    recorded: asyncio.Future[Recorded]
    """The record, once it is durable."""
    followed_up: asyncio.Task[Recorded]
    """The same, once the images that the change requires are queued."""
    caller_gone: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Ends the change unless its content has been fetched."""

    async def wait(self) -> Recorded:
        """Raises the reason if it was refused. If it is cancelled, so is a fetch; a fetched adapter
        is recorded."""
        try:
            return await asyncio.shield(self.followed_up)
        except asyncio.CancelledError:
            self.caller_gone.set()
            raise


class Changes:
    """The changes that run."""

    def __init__(self, standing: StandingImages) -> None:
        self._standing = standing
        self._tasks: set[asyncio.Task[Recorded]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def start(
        self,
        job: asyncio.Future[Recorded],
        count: Callable[[BaseException | None], None] = lambda error: None,
        caller_gone: threading.Event | None = None,
    ) -> Change:
        """Returns the handle of a change, which `caller_gone` ends while it fetches. Later it is
        not interrupted any more: its folder may become a blob at any moment, and its follow-up must
        run. `count` is called when it has ended."""

        def end(task: asyncio.Task[Recorded]) -> None:
            self._tasks.discard(task)
            count(asyncio.CancelledError() if task.cancelled() else task.exception())

        task = asyncio.create_task(self._follow_up(job))
        self._tasks.add(task)
        task.add_done_callback(end)
        return Change(job, task, caller_gone or threading.Event())

    async def _follow_up(self, job: asyncio.Future[Recorded]) -> Recorded:
        recorded = await job
        await self._standing.follow_up(recorded.record)
        return recorded
