"""The resources that the calls of a server share: the memory of their requests and of their
answers, the threads that parse, and how many calls of some methods run. Each account has its share
of all of it."""

from __future__ import annotations

from concurrent.futures import Executor
from contextvars import ContextVar

from servicekit.pace import Pace
from servicekit.shares import FairExecutor, Reservation, Shares
from servicekit.work_budget import WorkBudget

CALL_BYTES = 16 << 10
"""The least that every call holds: its headers, of at most this size, and its task."""
PLACE_SECONDS = 10.0
"""How long a call waits until its account's share has room for it."""
ANSWER_PACE = Pace(bytes_per_second=64 << 10, stall_seconds=30.0)

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The account of the caller of the call in progress, "" without a token."""
IS_KNOWN: ContextVar[bool] = ContextVar("is_known", default=False)
"""Whether the caller of the call in progress has a token that the policy knows, or there is no
policy."""


class CallPlaces:
    """`request_bytes` count messages that are arriving or that a handler holds, `answer_bytes`
    messages that handlers make and that nobody has read yet. Readers may not be slower than `pace`.
    `request_work` is the work of reading and parsing. Lives on the event loop."""

    def __init__(
        self,
        request_bytes: Shares,
        answer_bytes: Shares,
        share: float = 1.0,
        pace: Pace = ANSWER_PACE,
    ) -> None:
        self.request_bytes = request_bytes
        self.answer_bytes = answer_bytes
        self.share = share
        self.pace = pace
        # One thread: parsing and converting take turns with the event loop as it is.
        self.parsers = FairExecutor(1, "parse", share)
        self.request_work = WorkBudget("request_work", share)
        self._running: dict[str, Shares] = {}

    @property
    def shares(self) -> tuple[Shares, ...]:
        """The places that all calls have in common."""
        return self.request_bytes, self.answer_bytes, self.parsers.shares

    async def turn(self, method: str, max_running: int) -> Reservation:
        """Returns a place among the calls of this method that run at once. Raises ShareExceeded if
        there is none in time."""
        running = self._running.get(method)
        if running is None:
            running = self._running[method] = Shares(f"calls of {method}", max_running, self.share)
        return await running.wait(CALLER.get(), 1, PLACE_SECONDS)

    def parsers_of(self, account: str) -> Executor:
        """Returns the thread that parses for this account, whose work is charged to it."""
        return self.request_work.measured(account, self.parsers.of(account))

    def close(self) -> None:
        """Ends the threads once they have parsed their messages."""
        self.parsers.close()


async def wait_for(shares: Shares, num_bytes: int) -> Reservation:
    """Returns the bytes for the call in progress. Raises ShareExceeded if they are not there in
    time."""
    return await shares.wait(CALLER.get(), num_bytes, PLACE_SECONDS)
