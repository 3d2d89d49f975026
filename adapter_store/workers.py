"""A bounded pool of threads for jobs of different urgency."""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Lower goes first. Among equals, first come, first served."""

    PULL = 0
    PINNED = 1
    AHEAD = 2


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    done: asyncio.Future[Any] = field(repr=False)
    started: bool = False


class Workers:
    """Lives on one event loop. A running job is never interrupted."""

    def __init__(self, num_workers: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._free = num_workers
        self._order = itertools.count()
        self._heap: list[tuple[int, int, _Job]] = []
        self._jobs: dict[Hashable, _Job] = {}

    async def run(self, key: Hashable, priority: Priority, work: Callable[[], T]) -> T:
        """Runs `work` in a thread when it is its turn. One job per key at a time."""
        assert key not in self._jobs
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._jobs[key] = job
        self._push(priority, job)
        try:
            return await job.done
        finally:
            del self._jobs[key]

    def hurry(self, key: Hashable) -> None:
        """Lets a waiting job go before all that is less urgent than a pull."""
        job = self._jobs.get(key)
        if job is not None and not job.started:
            self._push(Priority.PULL, job)

    def close(self) -> None:
        """Runs nothing that has not started; waits for what has."""
        self._heap.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _push(self, priority: Priority, job: _Job) -> None:
        heapq.heappush(self._heap, (priority, next(self._order), job))
        self._start_next()

    def _start_next(self) -> None:
        while self._free and self._heap:
            job = heapq.heappop(self._heap)[2]
            if job.started or job.done.done():  # hurried before, or no longer wanted
                continue
            job.started = True
            self._free -= 1
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._executor, job.work).add_done_callback(
                lambda result, job=job: self._finish(job, result)  # type: ignore[misc]
            )

    def _finish(self, job: _Job, result: asyncio.Future[Any]) -> None:
        self._free += 1
        if not job.done.done():
            if result.cancelled():
                job.done.cancel()
            elif (error := result.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
        self._start_next()
