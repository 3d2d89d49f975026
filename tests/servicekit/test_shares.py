"""Shares of a finite place, over random histories; and threads that accounts share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servicekit.errors import ShareExceeded
from servicekit.shares import (
    INTERNAL,
    FairExecutor,
    Request,
    Reservation,
    Shares,
    limit_of,
)
from tests.support.examples import examples
from tests.support.machine.limits import no_more_threads
from tests.support.wait import TIMEOUT_S, until

ACCOUNTS = ("a", "b", "c")


class History(RuleBasedStateMachine):
    """Reserves, waits, grows, releases and cancels in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares("places", 12, 0.5, max_waiting=4)
        self.held: list[Reservation] = []
        self.waiting: list[Request] = []

    def granted(self, reservation: Reservation) -> None:
        self.check_grant(reservation.account, reservation.amount)
        self.held.append(reservation)

    def limit(self, account: str) -> int:
        return limit_of(12, self.shares.used - self.shares.used_by(account), 0.5)

    def check_grant(self, account: str, amount: int) -> None:
        """What an account has just got is within its share, or the only thing that it holds."""
        before = self.shares.used_by(account) - amount
        assert before == 0 or before + amount <= self.limit(account)

    @rule(account=st.sampled_from(ACCOUNTS), amount=st.integers(1, 14))
    def reserve(self, account: str, amount: int) -> None:
        free = self.shares.capacity - self.shares.used
        had = self.shares.used_by(account)
        fits = amount <= free and (had == 0 or had + amount <= self.limit(account))
        if fits:
            self.held.append(self.shares.reserve(account, amount))
            self.check_grant(account, amount)
            assert self.held[-1].is_over_share == (amount > self.limit(account))
            return
        with pytest.raises(ShareExceeded) as refusal:
            self.shares.reserve(account, amount)
        assert refusal.value.subject == "places"
        assert (refusal.value.retry_after_s > 0) == (amount <= self.shares.capacity)

    @rule(account=st.sampled_from(ACCOUNTS), amount=st.integers(1, 14))
    def wait(self, account: str, amount: int) -> None:
        num_waiting = sum(
            each.account == account and each.granted is not None for each in self.waiting
        )
        try:
            self.waiting.append(self.shares.request(account, self.granted, amount))
        except ShareExceeded:
            assert num_waiting == 4 or amount > self.shares.capacity

    @precondition(lambda self: self.held)
    @rule(data=st.data(), amount=st.integers(1, 6))
    def grow(self, data, amount: int) -> None:
        reservation = data.draw(st.sampled_from(self.held))
        before = reservation.amount
        try:
            reservation.grow(amount)
        except ShareExceeded:
            assert reservation.amount == before
        else:
            self.check_grant(reservation.account, amount)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data) -> None:
        reservation = data.draw(st.sampled_from(self.held))
        self.held.remove(reservation)
        reservation.release()
        reservation.release()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.shares.cancel(request)
        assert not self.shares.cancel(request)

    @invariant()
    def accounts_are_right(self) -> None:
        self.shares.check_integrity()
        assert self.shares.used == sum(each.amount for each in self.held) <= 12
        for account in ACCOUNTS:
            mine = [each.amount for each in self.held if each.account == account]
            assert self.shares.used_by(account) == sum(mine)

    def teardown(self) -> None:
        for request in self.waiting:
            self.shares.cancel(request)
        while self.held:
            self.held.pop().release()
        use = self.shares.use()
        assert use.used == use.num_waiting == 0


History.TestCase.settings = settings(
    deadline=None, max_examples=examples(60), stateful_step_count=30
)
TestHistory = History.TestCase


def test_a_newcomer_finds_something_whoever_came_before() -> None:
    shares = Shares("uploads", 64, 0.5, setting="--max-uploads")
    for account, expected in (("a", 32), ("b", 16), ("c", 8)):
        for _ in range(expected):
            shares.reserve(account)
        with pytest.raises(ShareExceeded) as refusal:
            shares.reserve(account)
        assert refusal.value.subject == "uploads"
        assert "--max-uploads" in refusal.value.message
        assert "50%" in refusal.value.message


def test_what_grows_beyond_a_share_is_not_told_to_try_again() -> None:
    shares = Shares("bytes", 10, 0.5)
    others = shares.reserve("b", 4)
    held = shares.reserve("a", 3)
    with pytest.raises(ShareExceeded) as refusal:
        held.grow(2)
    assert refusal.value.retry_after_s > 0  # once b has let go
    others.release()
    held.grow(2)
    with pytest.raises(ShareExceeded, match="6 at once are more than the maximum of 5") as refusal:
        held.grow(1)
    assert refusal.value.retry_after_s == 0
    assert shares.use().num_refused == 2


def test_with_a_share_of_one_the_first_may_take_everything() -> None:
    shares = Shares("uploads", 4)
    held = [shares.reserve("") for _ in range(4)]
    with pytest.raises(ShareExceeded):
        shares.reserve("")
    held[0].release()
    shares.reserve("")


def test_what_is_larger_than_a_share_is_had_one_at_a_time() -> None:
    shares = Shares("bytes", 10, 0.5)
    with shares.reserve("a", 9):
        with pytest.raises(ShareExceeded):
            shares.reserve("a")
        shares.reserve("b").release()
    with shares.reserve("a", 1), pytest.raises(ShareExceeded):
        shares.reserve("a", 9)


def test_after_the_release_nothing_can_be_added() -> None:
    shares = Shares("bytes", 10)
    held = shares.reserve("a")
    held.release()
    with pytest.raises(ShareExceeded):
        held.grow(1)
    assert shares.used == 0


def test_waiting_ends_with_the_units_the_time_or_the_waiter() -> None:
    async def scenario() -> None:
        shares = Shares("bytes", 10)
        first = shares.reserve("a", 10)
        with pytest.raises(ShareExceeded):
            await shares.wait("b", 1, 0.01)
        leaving = asyncio.create_task(shares.wait("b", 1, TIMEOUT_S))
        staying = asyncio.create_task(shares.wait("c", 1, TIMEOUT_S))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        first.release()
        (await staying).release()
        shares.check_integrity()
        assert shares.used == shares.use().num_waiting == 0

    asyncio.run(scenario())


@pytest.fixture
def pool():
    executor = FairExecutor(4, "calls", 0.5, max_queued=8)
    yield executor
    executor.close()


def test_an_account_that_keeps_its_threads_busy_leaves_others_theirs(pool) -> None:
    go_on = threading.Event()
    slow = [pool.submit("a", go_on.wait, TIMEOUT_S) for _ in range(6)]
    assert pool.of("b").submit(lambda: "b").result(TIMEOUT_S) == "b"
    assert pool.shares.used_by("a") == 2
    assert pool.shares.use().num_waiting == 4
    go_on.set()
    assert all(each.result(TIMEOUT_S) for each in slow)
    until(lambda: pool.shares.used == 0)


def test_a_queue_is_bounded_and_its_tasks_are_served_in_turns(pool) -> None:
    go_on, order = threading.Event(), []
    blocks = [pool.submit(each, go_on.wait, TIMEOUT_S) for each in ("x", "y", "z", "w")]
    first = [pool.submit("a", order.append, "a") for _ in range(8)]
    with pytest.raises(ShareExceeded):
        pool.submit("a", print)
    second = [pool.submit("b", order.append, "b") for _ in range(2)]
    one = blocks.pop()
    go_on.set()
    for each in (one, *blocks, *first, *second):
        each.result(TIMEOUT_S)
    assert order.index("b") < 4  # not behind the eight that came before


def test_a_task_whose_caller_has_gone_is_dropped(pool) -> None:
    go_on, ran = threading.Event(), []
    slow = [pool.submit("a", go_on.wait, TIMEOUT_S) for _ in range(2)]
    gone: Future[None] = pool.submit("a", ran.append, "gone")
    assert gone.cancel()
    assert pool.shares.use().num_waiting == 0
    go_on.set()
    assert all(each.result(TIMEOUT_S) for each in slow)
    assert not ran


def test_the_services_own_work_always_finds_a_place_in_the_queue(pool) -> None:
    go_on, done = threading.Event(), []
    blocks = [pool.submit(each, go_on.wait, TIMEOUT_S) for each in ("x", "y", "z", "w")]
    own = [pool.submit(INTERNAL, done.append, number) for number in range(20)]
    go_on.set()
    for each in (*blocks, *own):
        each.result(TIMEOUT_S)
    assert done == list(range(20))


class Body(bytearray):
    """Something large that a task gets: can be referred to weakly."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_lets_go_of_its_arguments(pool, fails) -> None:
    """At once, not when the collector comes: bodies would pile up in between."""

    def work(body: Body) -> int:
        num_bytes = len(body)
        del body
        if fails:
            raise ValueError
        return num_bytes

    gc.collect()
    gc.disable()
    try:
        kept, bodies = [], []
        for _ in range(10):
            body = Body(1000)
            bodies.append(weakref.ref(body))
            kept.append(pool.of("a").submit(work, body))
            del body
            with contextlib.suppress(ValueError):
                kept[-1].result(TIMEOUT_S)
        futures = [weakref.ref(each) for each in kept]
        assert [body for body in bodies if body() is not None] == []
        until(lambda: pool.shares.used == 0)
        kept.clear()
        until(lambda: all(future() is None for future in futures))
    finally:
        gc.enable()


def test_a_task_that_is_cancelled_lets_go_of_its_arguments(pool) -> None:
    go_on, body = threading.Event(), Body(1000)
    found = weakref.ref(body)
    slow = [pool.submit("a", go_on.wait, TIMEOUT_S) for _ in range(2)]
    waiting = pool.submit("a", len, body)
    del body
    gc.disable()
    try:
        waiting.cancel()
        assert waiting.cancelled()
        del waiting
        assert found() is None
    finally:
        gc.enable()
    go_on.set()
    assert all(each.result(TIMEOUT_S) for each in slow)


def test_threads_are_there_when_no_more_can_be_started() -> None:
    executor = FairExecutor(2, "calls")
    both = threading.Barrier(2)
    with no_more_threads():
        tasks = [executor.submit("a", both.wait, TIMEOUT_S) for _ in range(2)]
        assert sorted(task.result(TIMEOUT_S) for task in tasks) == [0, 1]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            FairExecutor(2, "calls")
    executor.close()


def test_a_shutdown_cancels_what_waits() -> None:
    executor = FairExecutor(1, "calls")
    begun, go_on = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return go_on.wait(TIMEOUT_S)

    running = executor.submit("a", work)
    waiting = executor.submit("a", print)
    assert begun.wait(TIMEOUT_S)
    threading.Timer(0.05, go_on.set).start()
    executor.close()
    assert running.result()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError):
        executor.submit("a", print)
