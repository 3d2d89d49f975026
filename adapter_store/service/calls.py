"""Runs functions on the store's threads, each for the account of its caller."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from adapter_store.catalog.database import Interrupt
from adapter_store.core import Principal
from servicekit.pace import Pace
from servicekit.shares import INTERNAL, FairExecutor, Shares
from servicekit.telemetry import spans
from servicekit.work_budget import WorkBudget

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Places:
    """The resources that callers share, each tenant up to `share`: threads of short calls, of
    registrations and of ending reads of the database, places for uploads and watches, memory that
    pulls hold, disk for data being received, memory for ephemeral data, and processor time of lists
    and layouts. An upload may not be slower than `pace`."""

    share: float
    calls: FairExecutor
    fetches: FairExecutor
    interrupts: FairExecutor
    uploads: Shares
    watches: Shares
    pulled_bytes: Shares
    staged_bytes: Shares
    ephemeral_bytes: Shares
    list_work: WorkBudget
    pace: Pace


class Calls:
    """Short catalog work runs in `places.calls`, and registrations in `places.fetches`."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def call(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        calls = self.places.calls.of(caller.account)
        return asyncio.get_running_loop().run_in_executor(calls, function, *args)

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs the store's own work."""
        calls = self.places.calls.of(INTERNAL)
        return asyncio.get_running_loop().run_in_executor(calls, function)

    def fetch(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        work = partial(function, *args)
        if spans.current_sampled() is not None:  # the thread continues the span
            work = partial(contextvars.copy_context().run, work)
        fetches = self.places.fetches.of(caller.account)
        return asyncio.get_running_loop().run_in_executor(fetches, work)

    def read(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Calls a function that only reads; its work ends when its caller leaves."""
        assert not kwargs
        interrupt = Interrupt()

        def end(reading: asyncio.Future[T]) -> None:
            if reading.cancelled() and interrupt.set():
                # PostgreSQL is told so over a connection: not on this thread.
                self.places.interrupts.submit(caller.account, interrupt.cancel)

        reading = self.call(caller, partial(interrupt.run, function, *args))
        reading.add_done_callback(end)
        return reading

    async def read_list(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Reads as `read`, within the processor time of the caller's lists."""
        assert not kwargs
        work, account = self.places.list_work, caller.account
        await work.wait(account)
        return await self.read(caller, partial(work.run, account, function, *args))

    async def make_answer(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Makes the answer of a list off the event loop, as part of the processor time of the
        caller's lists."""
        assert not kwargs
        work, account = self.places.list_work, caller.account
        return await self.call(caller, partial(work.run, account, function, *args))

    async def work(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls a function that takes long, within the processor time of the caller's lists."""
        await self.places.list_work.wait(caller.account)
        return await self.make_answer(caller, function, *args, **kwargs)
