"""Shares of a finite place: how much one account may take while others are served too.

An account holds at most `share` of the units that others leave free, and at least one unit: with a
half, the first of 64 units one takes 32, the next 16, and the seventh finds the last one. An
account that holds nothing may take all free units, so that a thing that is larger than a share can
be had, one at a time; see Reservation.is_over_share. With a share of 1 the first comer may take
everything: for places whose callers are not told apart.

`FairExecutor` is such a place whose units are threads. `servicekit.pace` bounds how long a transfer
may hold its units.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from servicekit.errors import ShareExceeded

P = ParamSpec("P")
T = TypeVar("T")

RETRY_SECONDS = 1.0
MAX_QUEUED = 4096
"""How many tasks of one account may wait for a thread."""
INTERNAL = "(internal)"
"""The account of a service's own work. No caller has it: see Principal.account."""


def limit_of(capacity: int, used_by_others: int, share: float) -> int:
    """Returns how much an account may hold while others hold this much; may be more than is
    free."""
    return max(1, int(share * (capacity - used_by_others)))


class Reservation:
    """Units of a place that an account holds until `release`, or until the context ends.
    Thread-safe."""

    def __init__(
        self, shares: Shares, account: str, amount: int, *, is_over_share: bool = False
    ) -> None:
        self._shares = shares
        self._is_released = False
        self.account = account
        self.amount = amount
        self.is_over_share = is_over_share
        """Whether it took more than its account's share, as the only thing that the account has:
        who holds so much must hold it briefly."""

    def grow(self, amount: int) -> None:
        """Takes more, within the account's share. Raises ShareExceeded, also after the release;
        held units stay."""
        self._shares._grow(self, amount)

    def shrink(self, amount: int) -> None:
        """Gives back all but this much; nothing if it is less already."""
        self._shares._shrink(self, amount)

    def release(self) -> None:
        """Gives back everything. Idempotent."""
        self._shares._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class Request:
    """A wait for units: `granted` is called with them, in the thread that freed them, and must not
    block or raise. None once the wait has ended: its references are let go."""

    account: str
    amount: int
    granted: Callable[[Reservation], None] | None


@dataclass(frozen=True, slots=True)
class PlaceUse:
    """How full a place is, how many requests wait for it, and how many it has refused."""

    name: str
    capacity: int
    used: int
    num_waiting: int
    num_refused: int


class Shares:
    """A place of `capacity` units. `name` is its name in errors, as their subject and in words:
    "uploads", "staged_bytes". `setting` is the setting that decides its size.

    Thread-safe. Accounts that wait are served in turns, each in its own order.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        share: float = 1.0,
        *,
        setting: str = "",
        retry_after_s: float = RETRY_SECONDS,
        max_waiting: int = MAX_QUEUED,
    ) -> None:
        assert capacity > 0
        assert 0 < share <= 1
        self.name = name
        self.capacity = capacity
        self.share = share
        self._setting = setting
        self._retry_after_s = retry_after_s
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._used_total = 0
        # Accounts in the order of their turns; requests in the order of their arrival.
        self._waiting: OrderedDict[str, OrderedDict[int, Request]] = OrderedDict()
        self._num_waiting = 0
        self._num_refused = 0

    @property
    def used(self) -> int:
        return self._used_total

    def use(self) -> PlaceUse:
        with self._lock:
            return PlaceUse(
                self.name, self.capacity, self._used_total, self._num_waiting, self._num_refused
            )

    def used_by(self, account: str) -> int:
        with self._lock:
            return self._used[account]

    def check(self, account: str, amount: int) -> None:
        """Raises ShareExceeded, without a time to retry, for more than an account's share of an
        empty place: it might have them, but not keep them."""
        if amount > limit_of(self.capacity, 0, self.share):
            with self._lock:
                raise self._exceeded(account, 0, grown=amount)

    def reserve(self, account: str, amount: int = 1) -> Reservation:
        """Returns the units, to be used as a context. Raises ShareExceeded at once if the account
        has its share, or the place is full."""
        with self._lock:
            if not self._fits(account, amount):
                raise self._exceeded(account, amount)
            return self._take(account, amount)

    def request(
        self, account: str, granted: Callable[[Reservation], None], amount: int = 1
    ) -> Request:
        """Waits for the units: `granted` is called once they are there, maybe at once. Raises
        ShareExceeded if too many of the account wait already (of a service's own work never), or
        the place can never hold it."""
        request = Request(account, amount, granted)
        with self._lock:
            num_waiting = len(self._waiting.get(account, ()))
            is_full = num_waiting >= self._max_waiting and account != INTERNAL
            if is_full or amount > self.capacity:
                raise self._exceeded(account, amount, num_waiting=num_waiting)
            self._waiting.setdefault(account, OrderedDict())[id(request)] = request
            self._num_waiting += 1
        self._grant()
        return request

    def cancel(self, request: Request) -> bool:
        """Ends a wait. Returns False if it is granted already."""
        with self._lock:
            waiting = self._waiting.get(request.account, OrderedDict())
            if waiting.pop(id(request), None) is None:
                return False
            request.granted = None
            self._num_waiting -= 1
            if not waiting:
                del self._waiting[request.account]
        self._grant()  # those behind it may be smaller
        return True

    async def wait(self, account: str, amount: int, timeout_s: float) -> Reservation:
        """Returns the units once they are there, maybe at once. Raises ShareExceeded if they are
        not in time, or too many of the account wait already."""
        with self._lock:
            if account not in self._waiting and self._fits(account, amount):
                return self._take(account, amount)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Reservation] = loop.create_future()

        def give(reservation: Reservation) -> None:
            if found.done():
                reservation.release()
            else:
                found.set_result(reservation)

        request = self.request(account, lambda it: _call_on(loop, give, it), amount)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(found)
        except BaseException as error:
            self.cancel(request)
            if found.done():
                found.result().release()
            found.cancel()
            if isinstance(error, TimeoutError):
                with self._lock:
                    raise self._exceeded(account, amount) from None
            raise

    def check_integrity(self) -> None:
        """Asserts that the sums agree, and that nothing waits that could be granted."""
        with self._lock:
            assert self._used_total == sum(self._used.values()) <= self.capacity
            assert all(amount > 0 for amount in self._used.values()), "an account without units"
            assert all(self._waiting.values()), "an account without requests"
            assert self._num_waiting == sum(map(len, self._waiting.values()))
            assert self._next() is None, "a request waits that fits"

    # With the lock held.

    def _limit(self, account: str) -> int:
        return limit_of(self.capacity, self._used_total - self._used[account], self.share)

    def _fits(self, account: str, amount: int) -> bool:
        if self._used_total + amount > self.capacity:
            return False
        used = self._used[account]
        return used == 0 or used + amount <= self._limit(account)

    def _take(self, account: str, amount: int) -> Reservation:
        is_over_share = amount > self._limit(account)
        self._add(account, amount)
        return Reservation(self, account, amount, is_over_share=is_over_share)

    def _add(self, account: str, amount: int) -> None:
        self._used[account] += amount
        self._used_total += amount
        if self._used[account] == 0:
            del self._used[account]

    def _next(self) -> Request | None:
        """Returns the request whose turn it is, if one fits: the first of each account only, so
        that a large one is not passed by its account's small ones."""
        if self._used_total >= self.capacity:
            return None
        for account, requests in self._waiting.items():
            first = next(iter(requests.values()))
            if self._fits(account, first.amount):
                return first
        return None

    def _exceeded(
        self, account: str, amount: int, *, num_waiting: int = 0, grown: int = 0
    ) -> ShareExceeded:
        """Counts a refusal, and returns its error: without a time to retry for units that can never
        be had, as `amount` more for a reservation that has `grown` beyond its share."""
        self._num_refused += 1
        most = limit_of(self.capacity, 0, self.share) if grown else self.capacity
        can_wait = grown + amount <= most
        setting = f" ({self._setting})" if self._setting else ""
        who = account or "all callers together"
        message = f"{self.name}: {self._used[account]} of {self.capacity}{setting} held by {who}"
        if not can_wait:
            message += f"; {grown + amount} at once are more than the maximum of {most}"
        elif num_waiting:
            message += f", and {num_waiting} more waited for; try again later"
        elif self.share == 1:
            message += f"; {amount} more are not free now: try again later"
        else:
            message += (
                f"; {amount} more are not free now: one tenant's share is at most "
                f"{self.share:.0%} of the part that others leave free; try again later"
            )
        wait_s = self._retry_after_s if can_wait else 0.0
        return ShareExceeded(message, subject=self.name, retry_after_s=wait_s)

    # Without it.

    def _grow(self, reservation: Reservation, amount: int) -> None:
        with self._lock:
            if reservation._is_released:
                raise ShareExceeded(f"{self.name}: given back already", subject=self.name)
            if not self._fits(reservation.account, amount):
                raise self._exceeded(reservation.account, amount, grown=reservation.amount)
            self._add(reservation.account, amount)
            reservation.amount += amount

    def _shrink(self, reservation: Reservation, amount: int) -> None:
        with self._lock:
            surplus = max(0, reservation.amount - amount)
            if surplus:
                self._add(reservation.account, -surplus)
                reservation.amount -= surplus
        if surplus:
            self._grant()

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            amount, reservation.amount = reservation.amount, 0
            reservation._is_released = True
            if amount:
                self._add(reservation.account, -amount)
        if amount:
            self._grant()

    def _grant(self) -> None:
        """Grants requests that fit, one request of each account after the other."""
        while True:
            with self._lock:
                request = self._next()
                if request is None:
                    return
                requests = self._waiting.pop(request.account)
                del requests[id(request)]
                if requests:
                    self._waiting[request.account] = requests  # behind the others
                self._num_waiting -= 1
                reservation = self._take(request.account, request.amount)
                granted, request.granted = request.granted, None
            assert granted is not None
            granted(reservation)


def _call_on(
    loop: asyncio.AbstractEventLoop, give: Callable[[Reservation], None], it: Reservation
) -> None:
    try:
        loop.call_soon_threadsafe(give, it)
    except RuntimeError:  # the loop has ended, and with it who waited
        it.release()


class FairExecutor:
    """Threads that accounts share. `of` gives an account's own executor: its tasks beyond its share
    wait in their own order, and are started in turns with the others'. One whose future is
    cancelled before it starts leaves the queue. A function and its arguments are let go of when
    it has been called, however long its future lives on."""

    def __init__(
        self, num_threads: int, name: str, share: float = 1.0, max_queued: int = MAX_QUEUED
    ) -> None:
        """Starts all threads: later there may be none to be had. Raises RuntimeError if so."""
        self.shares = Shares(name, num_threads, share, max_waiting=max_queued)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._queued: set[Future[Any]] = set()
        self._is_closed = False
        _start_threads(self._pool, num_threads)

    def of(self, account: str) -> Executor:
        """Returns an executor of this account's tasks, whose `submit` raises ShareExceeded if too
        many of them wait."""
        return _AccountExecutor(self, account)

    def submit(
        self, account: str, function: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Runs the function in a thread of the account's share; see Executor.submit. Raises
        ShareExceeded if too many functions wait, and RuntimeError after the shutdown."""
        future: Future[T] = Future()
        task = _Task(partial(function, *args, **kwargs), future)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the executor is shut down")
            self._queued.add(future)

        def start(reservation: Reservation) -> None:
            try:
                self._pool.submit(task.run, reservation)
            except RuntimeError:  # it was shut down a moment ago
                reservation.release()
                future.cancel()

        try:
            request = self.shares.request(account, start)
        except BaseException:
            self._queued.discard(future)
            raise
        # No reference to the future: a cycle would keep it until the collector finds it.
        future.add_done_callback(partial(self._leave, request))
        return future

    def close(self) -> None:
        """Cancels jobs that have not started, and waits for the rest."""
        with self._lock:
            self._is_closed = True
            queued = list(self._queued)
        for future in queued:
            future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _leave(self, request: Request, future: Future[Any]) -> None:
        self._queued.discard(future)
        self.shares.cancel(request)


class _Task(Generic[T]):
    """A function that a thread calls, once, for a future. It refers to neither afterwards: frames
    of the thread refer to the task as long as an error has its traceback."""

    def __init__(self, work: Callable[[], T], future: Future[T]) -> None:
        self._content: tuple[Callable[[], T], Future[T]] | None = work, future

    def run(self, reservation: Reservation) -> None:
        assert self._content is not None
        (work, future), self._content = self._content, None
        if not future.set_running_or_notify_cancel():
            reservation.release()
            return
        try:
            result = work()
        except BaseException as error:
            del work
            reservation.release()
            future.set_exception(error)
            del future
        else:
            del work
            reservation.release()
            future.set_result(result)


def _start_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Starts so many threads, which a pool else starts when it needs them."""
    started = threading.Barrier(num_threads + 1)
    try:
        for _ in range(num_threads):
            pool.submit(started.wait)
        started.wait()
    except BaseException:
        started.abort()
        pool.shutdown(wait=False)
        raise


class _AccountExecutor(Executor):
    def __init__(self, executor: FairExecutor, account: str) -> None:
        self._executor = executor
        self._account = account

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(self._account, function, *args, **kwargs)
