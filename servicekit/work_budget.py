"""How much processor time each account may take by requests that are large or refused, lists, and
images.

The time that an account takes is a debt that decays by the clock. Who owes more than a burst waits
with its next request until the debt is paid; nobody else does, and nothing is taken from others'
places.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from servicekit.errors import ShareExceeded

P = ParamSpec("P")
T = TypeVar("T")

PROCESSORS = 0.1
"""Processors that an account may take on average, once it has taken a burst."""
BURST_SECONDS, MAX_DEBT_SECONDS = 0.5, 1.5
"""Processor time that it may take before it waits, and the most that it may owe, so that an account
that stops waits no longer than 10 seconds."""
TURN_SECONDS = 5e-3
"""The charge of a request that had to wait, so that the requests after it go on one by one."""
WAIT_SECONDS = 10.0
MAX_WAITING = 4096
MAX_PAID = 256
"""How many accounts without debts are remembered."""


@dataclass(slots=True)
class _Debt:
    """Seconds of a processor, as they were at `time_s` by the monotonic clock."""

    seconds: float = 0.0
    time_s: float = 0.0
    num_waiting: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    work: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkBudget:
    """Bounds each account's work to `processors` on average. With a `share` of 1 there is no bound:
    callers are not told apart, or may have everything. `charge` is thread-safe; `wait` is for one
    event loop."""

    def __init__(
        self, name: str, share: float, processors: float = PROCESSORS, wait_s: float = WAIT_SECONDS
    ) -> None:
        """`name` is the work's name in errors."""
        self._name = name
        self._is_bounded = share < 1
        self.processors = processors
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._debts: dict[str, _Debt] = {}

    def debt_s(self, account: str) -> float:
        """Returns the account's debt, in seconds of a processor."""
        with self._lock:
            found = self._debts.get(account)
            return 0.0 if found is None else self._owed(found, time.monotonic())

    def charge(self, account: str, work_s: float) -> None:
        """Counts work that is done."""
        if self._is_bounded and work_s > 0:
            self._add(account, work_s)

    def run(
        self, account: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the function's result, and charges its processor time in this thread, also if it
        fails or nobody waits for it any more."""
        start_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self.charge(account, time.thread_time() - start_s)

    def measured(self, account: str, executor: Executor) -> Executor:
        """Returns the executor, whose tasks are charged to the account."""
        return _Measured(self, account, executor) if self._is_bounded else executor

    async def wait(self, account: str) -> None:
        """Returns once the account owes no more than a burst. Raises ShareExceeded if that takes
        too long, or too many of its requests wait already."""
        debt = self._debts.get(account)
        if debt is None or self.debt_s(account) <= BURST_SECONDS:
            return
        if debt.num_waiting >= MAX_WAITING:
            raise self._exceeded(account)
        with _waiting(debt):
            try:
                async with asyncio.timeout(self.wait_s), debt.turn:
                    while (excess_s := self.debt_s(account) - BURST_SECONDS) > 0:
                        await asyncio.sleep(excess_s / self.processors)
                    self._add(account, TURN_SECONDS)
            except TimeoutError:
                raise self._exceeded(account) from None

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Enters like `wait`, one caller of an account at a time: for work that costs much at once,
        whose price is known when it is done. Charge it before the context ends. Raises as
        `wait`."""
        if not self._is_bounded:
            yield
            return
        with self._lock:
            debt = self._debt_of(account, time.monotonic())
        if debt.num_waiting >= MAX_WAITING:
            raise self._exceeded(account)
        with _waiting(debt):
            try:
                async with asyncio.timeout(self.wait_s):
                    await debt.work.acquire()
            except TimeoutError:
                raise self._exceeded(account) from None
            try:
                await self.wait(account)
                yield
            finally:
                debt.work.release()

    def _debt_of(self, account: str, now_s: float) -> _Debt:
        found = self._debts.get(account)
        if found is None:
            self._forget_paid(now_s)
            found = self._debts[account] = _Debt()
        return found

    def _add(self, account: str, work_s: float) -> None:
        now_s = time.monotonic()
        with self._lock:
            debt = self._debt_of(account, now_s)
            debt.seconds = min(self._owed(debt, now_s) + work_s, MAX_DEBT_SECONDS)
            debt.time_s = now_s

    def _owed(self, debt: _Debt, now_s: float) -> float:
        return max(0.0, debt.seconds - (now_s - debt.time_s) * self.processors)

    def _forget_paid(self, now_s: float) -> None:
        if len(self._debts) < MAX_PAID:
            return
        for account, debt in list(self._debts.items()):
            if not debt.num_waiting and not self._owed(debt, now_s):
                del self._debts[account]

    def _exceeded(self, account: str) -> ShareExceeded:
        excess_s = max(0.0, self.debt_s(account) - BURST_SECONDS)
        return ShareExceeded(
            f"{self._name}: {account} has taken more than {self.processors:g} of a processor for "
            f"large or refused requests, lists or images; try again later",
            subject=self._name,
            retry_after_s=max(1.0, excess_s / self.processors),
        )


@contextmanager
def _waiting(debt: _Debt) -> Iterator[None]:
    debt.num_waiting += 1
    try:
        yield
    finally:
        debt.num_waiting -= 1


class _Measured(Executor):
    def __init__(self, budget: WorkBudget, account: str, executor: Executor) -> None:
        self._budget = budget
        self._account = account
        self._executor = executor

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(self._budget.run, self._account, function, *args, **kwargs)
