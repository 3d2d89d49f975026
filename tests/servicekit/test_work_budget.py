"""An account causes only so much work, whoever else there is notices nothing of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from servicekit import work_budget
from servicekit.errors import ShareExceeded
from servicekit.work_budget import BURST_SECONDS, MAX_DEBT_SECONDS, TURN_SECONDS, WorkBudget


class Clock:
    """The monotonic clock and asyncio's sleep, of which only the sleep moves the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()

    class Asyncio:
        sleep = staticmethod(clock.sleep)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(work_budget, "time", clock)
    monkeypatch.setattr(work_budget, "asyncio", Asyncio())
    return clock


def budget(share: float = 0.5, processors: float = 0.1, wait_s: float = 10.0) -> WorkBudget:
    return WorkBudget("work", share, processors, wait_s)


def test_a_burst_waits_for_nothing_and_a_debt_is_paid_by_time(clock: Clock) -> None:
    async def main() -> None:
        work = budget()
        work.charge("a", BURST_SECONDS)
        await work.wait("a")
        assert clock.now_s == 0
        work.charge("a", 0.5)
        await work.wait("a")
        assert clock.now_s == pytest.approx(5)
        clock.now_s += 1000
        assert work.debt_s("a") == 0

    asyncio.run(main())


def test_others_do_not_wait(clock: Clock) -> None:
    async def main() -> None:
        work = budget()
        work.charge("a", 100.0)
        await work.wait("b")
        assert clock.now_s == 0

    asyncio.run(main())


def test_a_debt_is_never_larger_than_what_a_request_waits_for(clock: Clock) -> None:
    async def main() -> None:
        work = budget(wait_s=1e9)
        work.charge("a", 1000.0)
        assert work.debt_s("a") == MAX_DEBT_SECONDS
        await work.wait("a")
        assert clock.now_s == pytest.approx((MAX_DEBT_SECONDS - BURST_SECONDS) / 0.1)

    asyncio.run(main())


def test_requests_that_wait_go_on_one_by_one(clock: Clock) -> None:
    async def main() -> list[float]:
        work, ends = budget(wait_s=1e9), []
        work.charge("a", BURST_SECONDS + 0.01)

        async def request() -> None:
            await work.wait("a")
            ends.append(clock.now_s)

        await asyncio.gather(*(request() for _ in range(5)))
        return ends

    ends = asyncio.run(main())
    assert all(late - early >= 0.99 * TURN_SECONDS / 0.1 for early, late in pairwise(ends))


def test_whoever_waits_too_long_is_told_when_to_try_again() -> None:
    async def main() -> ShareExceeded:
        work = budget(wait_s=0.01)
        work.charge("tenant a", 100.0)
        with pytest.raises(ShareExceeded, match="work: tenant a has taken more") as raised:
            await work.wait("tenant a")
        return raised.value

    error = asyncio.run(main())
    assert error.subject == "work"
    assert 9 < error.retry_after_s <= 10


def test_only_so_many_requests_of_an_account_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_budget, "MAX_WAITING", 3)

    async def main() -> None:
        work = budget()
        work.charge("a", 100.0)
        waiting = [asyncio.create_task(work.wait("a")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ShareExceeded):
            await work.wait("a")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not work._debts["a"].num_waiting

    asyncio.run(main())


def spin(seconds: float) -> str:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
    return "done"


def fail(seconds: float) -> None:
    spin(seconds)
    raise ValueError("refused")


def test_work_counts_in_whatever_thread_and_however_it_ends() -> None:
    work = budget(processors=1e-6)
    with pytest.raises(ValueError, match="refused"):
        work.run("a", fail, 0.02)
    with ThreadPoolExecutor(1) as pool:
        threads = work.measured("a", pool)
        assert threads.submit(spin, 0.03).result() == "done"
    assert 0.05 <= work.debt_s("a") < 0.5


def test_where_callers_are_not_told_apart_nothing_is_bounded() -> None:
    async def main() -> None:
        work = budget(share=1.0)
        work.charge("", 100.0)
        await work.wait("")
        assert work.debt_s("") == 0

    asyncio.run(main())


def test_accounts_that_have_paid_are_forgotten(clock: Clock) -> None:
    work = budget()
    for number in range(10 * work_budget.MAX_PAID):
        work.charge(f"a{number}", 0.01)
        clock.now_s += 1
    assert len(work._debts) <= work_budget.MAX_PAID
