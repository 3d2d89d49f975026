"""A bounded pool of threads for jobs of different urgency."""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import os
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

KEEP_NICENESS = 10
"""Of threads that put images on disk: nobody waits for them, and a model may be computing on the
same processors."""


class Priority(enum.IntEnum):
    """Lower goes first. Among equals, first come, first served."""

    PULL = 0
    """Somebody waits."""
    KEEP = 1
    """Puts on disk what is in memory."""
    PINNED = 2
    """From here on ahead of any pull: neither starts nor goes on while a pull's job is there."""
    AHEAD = 3


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[Turn], Any]
    priority: Priority
    order: int
    done: asyncio.Future[Any] = field(repr=False)
    has_thread: bool = False
    is_running: bool = False
    resumed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Turn:
    """A running job's place among the others."""

    give_way: Callable[[], None]
    """For the job's thread, between two steps: returns when nothing more urgent is left to do."""


class Workers:
    """Lives on one event loop. At most `num_workers` jobs run, those that gave way not counted."""

    def __init__(self, num_workers: int, name: str) -> None:
        # Of each priority, no more than `num_workers` jobs can have given way.
        self._executor = ThreadPoolExecutor(num_workers * len(Priority), thread_name_prefix=name)
        self._keepers = ThreadPoolExecutor(
            num_workers, thread_name_prefix=f"{name}-keep", initializer=_give_way_to_others
        )
        self._free = num_workers
        self._order = itertools.count()
        self._heap: list[tuple[Priority, int, _Job]] = []
        self._jobs: dict[Hashable, _Job] = {}
        self._running_pulls = 0
        self._most_urgent = max(Priority)
        """The first in the queue, or of a pull that runs; also read by the jobs' threads."""
        self._is_draining = False

    async def run(self, key: Hashable, priority: Priority, work: Callable[[Turn], T]) -> T:
        """Runs `work` in a thread when it is its turn. One job per key at a time."""
        assert key not in self._jobs
        if self._is_draining and priority is not Priority.KEEP:
            raise asyncio.CancelledError
        done = asyncio.get_running_loop().create_future()
        job = _Job(work, priority, next(self._order), done)
        self._jobs[key] = job
        self._push(job)
        self._start_next()
        try:
            return await job.done
        finally:
            del self._jobs[key]

    def hurry(self, key: Hashable) -> None:
        """Somebody waits for this job now: it goes before all that is less urgent than a pull."""
        job = self._jobs.get(key)
        if job is None or job.done.done() or job.priority <= Priority.KEEP:
            return
        job.priority, job.order = Priority.PULL, next(self._order)
        if job.is_running:
            self._running_pulls += 1
        else:
            self._push(job)
        self._start_next()

    def drain(self) -> None:
        """What has started goes on to its end, and what puts images on disk; nothing else starts:
        those who wait for it are cancelled."""
        self._is_draining = True
        for _, _, job in self._heap:
            if job.has_thread:
                job.resumed.set()
            elif job.priority is not Priority.KEEP:
                job.done.cancel()

    def close(self) -> None:
        """Drains, and waits for what has started. Nothing else runs any more."""
        self.drain()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._keepers.shutdown(wait=True, cancel_futures=True)

    def _push(self, job: _Job) -> None:
        heapq.heappush(self._heap, (job.priority, job.order, job))

    def _start_next(self) -> None:
        while (job := self._first()) is not None and self._may_start(job):
            heapq.heappop(self._heap)
            self._start(job)
        first = self._heap[0][0] if self._heap else max(Priority)
        self._most_urgent = Priority.PULL if self._running_pulls else first

    def _first(self) -> _Job | None:
        while self._heap:
            priority, _, job = self._heap[0]
            is_wanted = job.has_thread or not job.done.done()
            if is_wanted and not job.is_running and priority is job.priority:
                return job
            heapq.heappop(self._heap)  # hurried before, or no longer wanted
        return None

    def _may_start(self, job: _Job) -> bool:
        is_behind_pulls = job.priority >= Priority.PINNED and self._running_pulls > 0
        return self._free > 0 and not is_behind_pulls

    def _start(self, job: _Job) -> None:
        self._free -= 1
        self._running_pulls += job.priority is Priority.PULL
        job.is_running = True
        if job.has_thread:
            job.resumed.set()
            return
        job.has_thread = True
        loop = asyncio.get_running_loop()
        turn = Turn(lambda: self._give_way(loop, job))
        executor = self._keepers if job.priority is Priority.KEEP else self._executor
        loop.run_in_executor(executor, job.work, turn).add_done_callback(
            lambda result: self._finish(job, result)
        )

    def _stop(self, job: _Job) -> None:
        job.is_running = False
        self._free += 1
        self._running_pulls -= job.priority is Priority.PULL

    def _give_way(self, loop: asyncio.AbstractEventLoop, job: _Job) -> None:
        """In the job's thread."""
        if job.priority < Priority.PINNED or self._most_urgent >= job.priority or self._is_draining:
            return
        job.resumed.clear()
        loop.call_soon_threadsafe(self._pause, job)
        while not job.resumed.wait(1.0) and not self._is_draining:
            pass

    def _pause(self, job: _Job) -> None:
        if self._is_draining:
            job.resumed.set()
            return
        self._stop(job)
        self._push(job)
        self._start_next()

    def _finish(self, job: _Job, result: asyncio.Future[Any]) -> None:
        self._stop(job)
        job.has_thread = False
        if not job.done.done():
            if result.cancelled():
                job.done.cancel()
            elif (error := result.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
        elif not result.cancelled():
            result.exception()  # marks it as seen: nobody waits for it
        self._start_next()


def _give_way_to_others() -> None:
    """Lowers the calling thread's priority, which on Linux is the thread's own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + KEEP_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
