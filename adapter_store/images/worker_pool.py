"""A bounded pool of threads that run jobs by priority, and jobs of pulls in turns of accounts."""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from servicekit.errors import ShareExceeded
from servicekit.shares import INTERNAL, Request, Reservation, Shares

T = TypeVar("T")

WRITE_NICENESS = 10
"""How much nicer threads are that write images to disk: no caller waits for them, and a model may
be computing on the same processors."""


class Priority(enum.IntEnum):
    """The order of jobs: lower values first, and first come, first served among equals."""

    PULL = 0
    """A caller waits. Accounts take turns: one with many pulls does not delay another's."""
    WRITE = 1
    """Writes images in memory to disk."""
    PINNED = 2
    """From here on before any pull: such jobs neither start nor continue while a pull's job is
    there."""
    PRECOMPILE = 3


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[YieldPoint], Any]
    priority: Priority
    order: int
    done: asyncio.Future[Any] = field(repr=False)
    turn: Reservation | None = None
    """The resources of a pull's job while it is in the queue or runs."""
    waits: list[Request] = field(default_factory=list)
    """For a turn: one of each account whose pulls wait for the job."""
    has_thread: bool = False
    is_running: bool = False
    resumed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class YieldPoint:
    """Lets a running job step aside for more urgent ones."""

    wait: Callable[[], None]
    """Called by the job's thread between two steps: returns when no more urgent job is left."""


class WorkerPool:
    """Runs at most `num_workers` jobs at a time, not counting paused ones. Lives on one event loop.

    `turns` are for pulls' jobs: no more of them are in the queue than workers.
    """

    def __init__(self, num_workers: int, name: str) -> None:
        self.turns = Shares(f"{name}_workers", num_workers, setting=f"{name}_workers")
        # Per priority, no more than `num_workers` jobs can be paused.
        self._executor = ThreadPoolExecutor(num_workers * len(Priority), thread_name_prefix=name)
        self._writers = ThreadPoolExecutor(
            num_workers, thread_name_prefix=f"{name}-write", initializer=_lower_thread_priority
        )
        self._free = num_workers
        self._order = itertools.count()
        self._heap: list[tuple[Priority, int, _Job]] = []
        self._jobs: dict[Hashable, _Job] = {}
        self._running_pulls = 0
        self._most_urgent = max(Priority)
        """The priority of the first job in the queue, or PULL while one runs; also read by the
        jobs' threads."""
        self._is_draining = False

    async def run(
        self,
        key: Hashable,
        priority: Priority,
        work: Callable[[YieldPoint], T],
        accounts: Sequence[str] = (INTERNAL,),
    ) -> T:
        """Runs `work` in a thread when its priority allows, and for a pull when it is the turn of
        one of the accounts. One job per key at a time.

        Raises ShareExceeded if too many jobs of the accounts wait for their turns.
        """
        assert key not in self._jobs
        if self._is_draining and priority is not Priority.WRITE:
            raise asyncio.CancelledError
        done = asyncio.get_running_loop().create_future()
        job = _Job(work, priority, next(self._order), done)
        if priority is Priority.PULL:
            self._wait_for_turn(job, accounts)
        else:
            self._push(job)
        self._jobs[key] = job
        self._start_next()
        try:
            return await job.done
        finally:
            del self._jobs[key]
            if not job.has_thread:
                self._end_turn(job)
                self._start_next()

    def promote(self, key: Hashable, account: str = INTERNAL) -> None:
        """Raises a job that is less urgent than writing to the priority of a pull; a pull's job
        that waits for its turn may also take one of this account. Raises ShareExceeded."""
        job = self._jobs.get(key)
        if job is None or job.done.done() or job.priority is Priority.WRITE:
            return
        if job.priority is not Priority.PULL and job.is_running:
            job.priority = Priority.PULL
            self._running_pulls += 1
        elif not job.is_running and job.turn is None:
            before, job.priority = job.priority, Priority.PULL
            try:
                self._wait_for_turn(job, (account,))
            except ShareExceeded:
                job.priority = before
                raise
        self._start_next()

    def drain(self) -> None:
        """Lets started jobs and writes run to their end. Nothing else starts: its waiters are
        cancelled."""
        self._is_draining = True
        for job in self._jobs.values():
            if job.has_thread:
                job.resumed.set()
            elif job.priority is not Priority.WRITE:
                job.done.cancel()

    def close(self) -> None:
        """Drains, and waits for started jobs."""
        self.drain()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True, cancel_futures=True)

    def _push(self, job: _Job) -> None:
        heapq.heappush(self._heap, (job.priority, job.order, job))

    def _wait_for_turn(self, job: _Job, accounts: Sequence[str]) -> None:
        """Raises ShareExceeded if none of the accounts may wait."""
        refusal = None
        for account in accounts:
            try:
                begin = partial(self._begin_turn, job)
                job.waits.append(self.turns.request(account, begin))
            except ShareExceeded as error:
                refusal = error
        if refusal is not None and not job.waits:
            raise refusal

    def _begin_turn(self, job: _Job, turn: Reservation) -> None:
        """Queues a job that may run now. Call `_start_next` next."""
        if job.turn is None and not job.done.done():
            job.turn, job.order = turn, next(self._order)
            self._push(job)
        else:
            turn.release()

    def _end_turn(self, job: _Job) -> None:
        """Lets the next pulls' jobs into the queue. Call `_start_next` next."""
        waits, job.waits = job.waits, []
        for request in waits:
            self.turns.cancel(request)
        turn, job.turn = job.turn, None
        if turn is not None:
            turn.release()

    def _start_next(self) -> None:
        while (job := self._first()) is not None and self._may_start(job):
            heapq.heappop(self._heap)
            self._start(job)
        first = self._heap[0][0] if self._heap else max(Priority)
        self._most_urgent = Priority.PULL if self._running_pulls else first

    def _first(self) -> _Job | None:
        while self._heap:
            priority, _, job = self._heap[0]
            is_awaited = job.has_thread or not job.done.done()
            if is_awaited and not job.is_running and priority is job.priority:
                return job
            heapq.heappop(self._heap)  # promoted before, or cancelled
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
        yield_point = YieldPoint(lambda: self._yield_to_others(loop, job))
        executor = self._writers if job.priority is Priority.WRITE else self._executor
        loop.run_in_executor(executor, job.work, yield_point).add_done_callback(
            lambda result: self._finish(job, result)
        )

    def _stop(self, job: _Job) -> None:
        job.is_running = False
        self._free += 1
        self._running_pulls -= job.priority is Priority.PULL

    def _yield_to_others(self, loop: asyncio.AbstractEventLoop, job: _Job) -> None:
        """Pauses the job if a more urgent one is queued. Runs in the job's thread."""
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
        self._end_turn(job)
        if not job.done.done():
            if result.cancelled():
                job.done.cancel()
            elif (error := result.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
        elif not result.cancelled():
            result.exception()  # marks it as retrieved: no caller waits for it
        self._start_next()


def _lower_thread_priority() -> None:
    """Lowers the calling thread's priority, which on Linux is the thread's own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + WRITE_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
