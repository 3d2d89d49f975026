"""Shares of a finite place, over random histories; and threads that accounts share."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servicekit.errors import ShareExceeded
from servicekit.shares import FairExecutor, Request, Reservation, Shares
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

    def check_grant(self, account: str, amount: int) -> None:
        """What an account has just got is within its share, or the only thing that it holds."""
        before = self.shares.used_by(account) - amount
        assert before == 0 or before + amount <= self.shares.limit(account)

    @rule(account=st.sampled_from(ACCOUNTS), amount=st.integers(1, 14))
    def reserve(self, account: str, amount: int) -> None:
        free = self.shares.capacity - self.shares.used
        had = self.shares.used_by(account)
        fits = amount <= free and (had == 0 or had + amount <= self.shares.limit(account))
        try:
            self.held.append(self.shares.reserve(account, amount))
        except ShareExceeded as error:
            assert not fits
            assert error.subject == "places"
            assert (error.retry_after_s > 0) == (amount <= self.shares.capacity)
        else:
            assert fits
            self.check_grant(account, amount)

    @rule(account=st.sampled_from(ACCOUNTS), amount=st.integers(1, 14))
    def wait(self, account: str, amount: int) -> None:
        num_waiting = self.shares.num_waiting_of(account)
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
        assert self.shares.used == self.shares.num_waiting == self.shares.num_accounts == 0


History.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestHistory = History.TestCase


def test_a_newcomer_finds_something_whoever_came_before() -> None:
    shares = Shares("uploads", 64, 0.5, setting="--max-uploads")
    taken = {}
    for account in ("a", "b", "c"):
        with pytest.raises(ShareExceeded) as refusal:
            for taken[account] in range(64):
                shares.reserve(account)
        assert refusal.value.subject == "uploads"
        assert "--max-uploads" in refusal.value.message
        assert "50%" in refusal.value.message
    assert taken == {"a": 32, "b": 16, "c": 8}


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
        assert shares.used == shares.num_waiting == 0

    asyncio.run(scenario())


@pytest.fixture
def pool():
    executor = FairExecutor(4, "calls", 0.5, max_queued=8)
    yield executor
    executor.shutdown()


def test_an_account_that_keeps_its_threads_busy_leaves_others_theirs(pool) -> None:
    go_on = threading.Event()
    slow = [pool.submit("a", go_on.wait, TIMEOUT_S) for _ in range(6)]
    assert pool.of("b").submit(lambda: "b").result(TIMEOUT_S) == "b"
    assert pool.shares.used_by("a") == 2
    assert pool.shares.num_waiting_of("a") == 4
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
    assert pool.shares.num_waiting == 0
    go_on.set()
    assert all(each.result(TIMEOUT_S) for each in slow)
    assert not ran


def test_a_shutdown_cancels_what_waits() -> None:
    executor = FairExecutor(1, "calls")
    go_on = threading.Event()
    running = executor.submit("a", go_on.wait, TIMEOUT_S)
    waiting = executor.submit("a", print)
    threading.Timer(0.05, go_on.set).start()
    executor.shutdown()
    assert running.result()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError):
        executor.submit("a", print)
