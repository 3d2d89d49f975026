from __future__ import annotations

import asyncio
import os
import threading
from functools import partial

import pytest

from adapter_store.images.worker_pool import WRITE_NICENESS, Priority, WorkerPool
from servicekit.errors import ShareExceeded
from tests.support.wait import TIMEOUT_S


def run(scenario, num_workers: int = 1):
    async def main():
        workers = WorkerPool(num_workers, "test")
        try:
            return await asyncio.wait_for(scenario(workers), TIMEOUT_S)
        finally:
            workers.close()

    return asyncio.run(main())


def test_pulls_go_before_precompilation():
    done: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        gate = threading.Event()
        jobs = [
            asyncio.ensure_future(
                workers.run("gate", Priority.PULL, lambda _: gate.wait(TIMEOUT_S))
            )
        ]
        for name, priority in (
            ("ahead1", Priority.PRECOMPILE),
            ("pinned", Priority.PINNED),
            ("ahead2", Priority.PRECOMPILE),
            ("pull1", Priority.PULL),
            ("pull2", Priority.PULL),
        ):
            await asyncio.sleep(0)
            work = workers.run(name, priority, lambda _, name=name: done.append(name))
            jobs.append(asyncio.ensure_future(work))
        await asyncio.sleep(0)
        workers.promote("ahead2")
        workers.promote("gate")
        workers.promote("unknown")
        gate.set()
        await asyncio.gather(*jobs)

    run(scenario)
    assert done == ["pull1", "pull2", "ahead2", "pinned", "ahead1"]


def test_accounts_take_turns():
    """One with many pulls delays another's by one job each, also where both want the same image."""
    done: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        gate = threading.Event()
        run = partial(workers.run, priority=Priority.PULL)
        jobs = [run("gate", work=lambda _: gate.wait(TIMEOUT_S), accounts=["a"])]
        for name in [*(f"a{i}" for i in range(20)), "b0", "b1"]:
            jobs.append(run(name, work=lambda _, name=name: done.append(name), accounts=[name[0]]))
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await asyncio.sleep(0)
        workers.promote("a19", "c")
        tasks[2].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert workers.turns.use().num_waiting == workers.turns.used == 0

    run(scenario)
    assert done[:6] == ["a0", "b0", "a19", "a2", "b1", "a3"]
    assert len(done) == 21


def test_jobs_that_wait_for_a_turn_are_bounded():
    async def scenario(workers: WorkerPool) -> None:
        gate = threading.Event()
        workers.turns._max_waiting = 3
        jobs = [
            workers.run(i, Priority.PULL, lambda _: gate.wait(TIMEOUT_S), ["a"]) for i in range(5)
        ]
        other = workers.run("b", Priority.PULL, lambda _: True, ["b"])
        tasks = [asyncio.ensure_future(job) for job in (*jobs, other)]
        await asyncio.sleep(0)
        gate.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [*[bool] * 4, ShareExceeded, bool]

    run(scenario)


def test_never_more_at_once_than_workers():
    running = peak = 0
    lock, all_run = threading.Lock(), threading.Barrier(3)

    def work(_) -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        all_run.wait(TIMEOUT_S)
        with lock:
            running -= 1

    async def scenario(workers: WorkerPool) -> None:
        await asyncio.gather(*(workers.run(i, Priority.PULL, work) for i in range(12)))

    run(scenario, num_workers=3)
    assert peak == 3


def test_errors_reach_the_caller_and_the_worker_goes_on():
    async def scenario(workers: WorkerPool) -> int:
        with pytest.raises(ZeroDivisionError):
            await workers.run("a", Priority.PULL, lambda _: 1 // 0)
        return await workers.run("a", Priority.PULL, lambda _: 7)

    assert run(scenario) == 7


def test_a_cancelled_job_that_waits_is_not_run():
    done: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        gate = threading.Event()
        first = asyncio.ensure_future(
            workers.run("a", Priority.PULL, lambda _: gate.wait(TIMEOUT_S))
        )
        second = asyncio.ensure_future(workers.run("b", Priority.PULL, lambda _: done.append("b")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first
        await workers.run("b", Priority.PULL, lambda _: done.append("again"))

    run(scenario)
    assert done == ["again"]


def steps(name: str, did: list[str], started: threading.Event, go: threading.Event):
    """A job of two steps that gives way in between."""

    def work(yield_point) -> None:
        did.append(f"{name} 1")
        started.set()
        assert go.wait(TIMEOUT_S)
        yield_point.wait()
        did.append(f"{name} 2")

    return work


def test_precompilation_yields_to_a_pull():
    did: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        started, go, pulling = threading.Event(), threading.Event(), threading.Event()
        ahead = workers.run("ahead", Priority.PRECOMPILE, steps("ahead", did, started, go))
        jobs = [asyncio.ensure_future(ahead)]
        await asyncio.to_thread(started.wait, TIMEOUT_S)
        for name in ("pull", "later"):
            jobs.append(
                asyncio.ensure_future(
                    workers.run(
                        name,
                        Priority.PULL if name == "pull" else Priority.PRECOMPILE,
                        lambda _, name=name: (did.append(name), pulling.set()),
                    )
                )
            )
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*jobs)

    run(scenario)
    assert did == ["ahead 1", "pull", "ahead 2", "later"]


def test_precompilation_does_not_continue_during_a_pull():
    did: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        started, go, gate = threading.Event(), threading.Event(), threading.Event()
        ahead = workers.run("ahead", Priority.PRECOMPILE, steps("ahead", did, started, go))
        first = asyncio.ensure_future(ahead)
        await asyncio.to_thread(started.wait, TIMEOUT_S)
        pulling = threading.Event()

        def pull(_) -> None:
            pulling.set()
            assert gate.wait(TIMEOUT_S)
            did.append("pull")

        second = asyncio.ensure_future(workers.run("pull", Priority.PULL, pull))
        await asyncio.to_thread(pulling.wait, TIMEOUT_S)
        third = asyncio.ensure_future(
            workers.run("next", Priority.PRECOMPILE, lambda _: did.append("next"))
        )
        await asyncio.sleep(0)
        go.set()
        gate.set()
        await asyncio.gather(first, second, third)

    run(scenario, num_workers=2)
    assert did[0] == "ahead 1"
    assert did.index("pull") < did.index("next")
    assert sorted(did) == ["ahead 1", "ahead 2", "next", "pull"]


def test_promoted_job_yields_no_more():
    did: list[str] = []

    async def scenario(workers: WorkerPool) -> None:
        started, go = threading.Event(), threading.Event()
        ahead = workers.run("ahead", Priority.PRECOMPILE, steps("ahead", did, started, go))
        jobs = [asyncio.ensure_future(ahead)]
        await asyncio.to_thread(started.wait, TIMEOUT_S)
        pull = workers.run("pull", Priority.PULL, lambda _: did.append("pull"))
        jobs.append(asyncio.ensure_future(pull))
        await asyncio.sleep(0)
        workers.promote("ahead")
        go.set()
        await asyncio.gather(*jobs)

    run(scenario)
    assert did == ["ahead 1", "ahead 2", "pull"]


def test_closing_lets_those_end_that_gave_way():
    did: list[str] = []

    async def main() -> None:
        workers = WorkerPool(1, "test")
        started, go, pulling, gate = (threading.Event() for _ in range(4))
        work = steps("ahead", did, started, go)
        ahead = asyncio.ensure_future(workers.run("ahead", Priority.PRECOMPILE, work))
        await asyncio.to_thread(started.wait, TIMEOUT_S)

        def pull(_) -> None:
            pulling.set()
            assert gate.wait(TIMEOUT_S)

        pulled = asyncio.ensure_future(workers.run("pull", Priority.PULL, pull))
        await asyncio.sleep(0)
        go.set()
        await asyncio.to_thread(pulling.wait, TIMEOUT_S)
        gate.set()
        workers.close()
        assert did == ["ahead 1", "ahead 2"]
        await asyncio.wait_for(asyncio.gather(ahead, pulled), TIMEOUT_S)

    asyncio.run(main())


def test_hurrying_what_has_just_ended_costs_no_worker():
    async def scenario(workers: WorkerPool) -> None:
        for _ in range(20):
            job = asyncio.ensure_future(workers.run("a", Priority.PRECOMPILE, lambda _: None))
            while not job.done():
                workers.promote("a")
                await asyncio.sleep(0)

    run(scenario)


def test_putting_on_disk_gives_way_to_what_computes():
    def niceness(_) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def scenario(workers: WorkerPool) -> tuple[int, int]:
        return (
            await workers.run("keep", Priority.WRITE, niceness),
            await workers.run("pull", Priority.PULL, niceness),
        )

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert run(scenario) == (before + WRITE_NICENESS, before)
