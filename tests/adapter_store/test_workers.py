from __future__ import annotations

import asyncio
import threading

import pytest

from adapter_store.workers import Priority, Workers


def run(scenario, num_workers: int = 1):
    async def main():
        workers = Workers(num_workers, "test")
        try:
            return await asyncio.wait_for(scenario(workers), 10)
        finally:
            workers.close()

    return asyncio.run(main())


def test_pulls_go_before_work_ahead():
    done: list[str] = []

    async def scenario(workers: Workers) -> None:
        gate = threading.Event()
        jobs = [asyncio.ensure_future(workers.run("gate", Priority.PULL, gate.wait))]
        for name, priority in (
            ("ahead1", Priority.AHEAD),
            ("pinned", Priority.PINNED),
            ("ahead2", Priority.AHEAD),
            ("pull1", Priority.PULL),
            ("pull2", Priority.PULL),
        ):
            await asyncio.sleep(0)
            work = workers.run(name, priority, lambda name=name: done.append(name))
            jobs.append(asyncio.ensure_future(work))
        await asyncio.sleep(0)
        workers.hurry("ahead2")
        workers.hurry("gate")
        workers.hurry("unknown")
        gate.set()
        await asyncio.gather(*jobs)

    run(scenario)
    assert done == ["pull1", "pull2", "ahead2", "pinned", "ahead1"]


def test_never_more_at_once_than_workers():
    running = peak = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    async def scenario(workers: Workers) -> None:
        await asyncio.gather(*(workers.run(i, Priority.PULL, work) for i in range(12)))

    run(scenario, num_workers=3)
    assert peak == 3


def test_errors_reach_the_caller_and_the_worker_goes_on():
    async def scenario(workers: Workers) -> int:
        with pytest.raises(ZeroDivisionError):
            await workers.run("a", Priority.PULL, lambda: 1 // 0)
        return await workers.run("a", Priority.PULL, lambda: 7)

    assert run(scenario) == 7


def test_a_cancelled_job_that_waits_is_not_run():
    done: list[str] = []

    async def scenario(workers: Workers) -> None:
        gate = threading.Event()
        first = asyncio.ensure_future(workers.run("a", Priority.PULL, gate.wait))
        second = asyncio.ensure_future(workers.run("b", Priority.PULL, lambda: done.append("b")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first
        await workers.run("b", Priority.PULL, lambda: done.append("again"))

    run(scenario)
    assert done == ["again"]
