"""What requests cost their account. A large one that is read and refused takes little memory, for a
moment, but much processor time; so one that was expensive keeps its place for a while. The places
that an account may hold then bound not only the memory but also the work that it causes: of 64 MiB,
a tenth of a processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from servicekit.errors import ShareExceeded
from servicekit.shares import Reservation

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 64 << 10
"""A request that takes no more is not paced: every message of names, numbers and labels."""
LINGER_SECONDS = 8.0
WORK_BYTES_PER_SECOND = 80 << 20
"""The units that a second of a processor counts for: about as many bytes are read and parsed in
it."""
MIN_WORK_SECONDS = 1e-3


class RequestCost:
    """Measures the work for one request, in whatever threads, and charges its `place`, whose units
    are bytes."""

    def __init__(self, place: Reservation) -> None:
        self._place = place
        self._work_s = 0.0

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the function's result, or raises its error."""
        start_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self._work_s += time.thread_time() - start_s

    def measured(self, executor: Executor) -> Executor:
        """Returns the executor, whose tasks are measured."""
        return _Measured(executor, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.charge()

    def charge(self) -> None:
        """Lets the place be as large as the request was expensive, if the account's share allows,
        and linger if that is large. To be called before the place is released, or by leaving the
        context."""
        if self._work_s >= MIN_WORK_SECONDS:
            with suppress(ShareExceeded):
                self._place.grow(int(self._work_s * WORK_BYTES_PER_SECOND))
        if self._place.amount > LARGE_BYTES:
            self._place.linger(LINGER_SECONDS)
        self._work_s = 0.0


REQUEST_COST: ContextVar[RequestCost | None] = ContextVar("request_cost", default=None)
"""What pays for the request in progress, if its method may take much work."""


def measured(executor: Executor) -> Executor:
    """Returns the executor, whose tasks are measured if the request in progress pays for them."""
    cost = REQUEST_COST.get()
    return executor if cost is None else cost.measured(executor)


class _Measured(Executor):
    def __init__(self, executor: Executor, cost: RequestCost) -> None:
        self._executor = executor
        self._cost = cost

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(self._cost.run, function, *args, **kwargs)
