"""Copying an adapter's files: several at once, each with retries, none for ever.

Waits between attempts grow exponentially, with jitter: many stores do not retry in step. A source
that answers too slowly is left: its worker is free again at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.limits import Abandoned
from adapter_store.sources.staging import FILES_AT_ONCE, READ_BYTES, Staging
from servicekit.pace import MinimumRate, Pace
from servicekit.shares import Shares

POLL_SECONDS = 0.25
MIN_POLL_SECONDS = 0.01
"""How often a fetch is checked for progress, and for a caller that has left."""
STEP_BYTES = 64 << 10
"""How much is read from a connection at a time: progress is noticed after each step."""
TOO_SLOW = "SOURCE_TOO_SLOW"

CHANGED = "SOURCE_CHANGED"
"""The reason of a failure that retrying cannot fix: the pinned content is gone."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The n-th wait is random, from 0 to first_seconds * 2^(n-1), and at most max_seconds."""

    attempts: int = 6
    first_seconds: float = 0.25
    max_seconds: float = 8.0


class Retry:
    """Counts the attempts at one transfer. Used by one thread."""

    def __init__(self, policy: RetryPolicy, staging: Staging) -> None:
        self._policy = policy
        self._staging = staging
        self._failures = 0

    def progressed(self) -> None:
        """Resets the count: the attempt made progress before it failed."""
        self._failures = 0

    def failed(self, error: SourceUnavailable, at_least_seconds: float = 0.0) -> None:
        """Waits before the next attempt.

        Raises `error` after the last attempt, and Draining if the store shuts down meanwhile.
        """
        self._failures += 1
        if self._failures >= self._policy.attempts or error.reason == CHANGED:
            raise error
        longest = min(
            self._policy.max_seconds, self._policy.first_seconds * 2 ** (self._failures - 1)
        )
        seconds = random.uniform(0, longest)
        self._staging.wait(max(seconds, min(at_least_seconds, self._policy.max_seconds)))


class FetchRunner:
    """Runs fetches, each in a thread of its own: a fetch that its source keeps waiting can be left.
    Of left and running ones there are at most `max_fetches`."""

    def __init__(self, pace: Pace, tenant_share: float, max_fetches: int) -> None:
        self._pace = pace
        self.running = Shares("fetches", max_fetches, tenant_share)

    def run(self, account: str, fetch: Callable[[], str], staging: Staging) -> str:
        """Returns the result of `fetch`, which writes to `staging`.

        Raises its errors, SourceUnavailable if the source is too slow, and as
        `Staging.check_cancelled`; then its thread ends with the next byte that it receives. Raises
        ShareExceeded if too many of the account do not end, RuntimeError if there are no more
        threads.
        """
        done: Future[str] = Future()
        place = self.running.reserve(account)

        def work() -> None:
            try:
                with place:
                    found = fetch()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(found)

        # A daemon: it must not keep a store from ending.
        thread = threading.Thread(target=work, name="source", daemon=True)
        try:
            thread.start()
        except BaseException:
            place.release()
            raise
        try:
            self._wait(done, staging)
        except BaseException:
            staging.abandon()
            raise
        return done.result()

    def _wait(self, done: Future[str], staging: Staging) -> None:
        rate, known_bytes = MinimumRate(self._pace), 0
        while not done.done():
            start_s, local_s = time.monotonic(), staging.work.local_seconds
            wait([done], timeout=max(MIN_POLL_SECONDS, min(POLL_SECONDS, rate.remaining_s)))
            if done.done():
                return
            staging.check_cancelled()
            elapsed_s = time.monotonic() - start_s
            rate.waited(max(0.0, elapsed_s - (staging.work.local_seconds - local_s)))
            now_bytes = staging.progress_bytes
            rate.received(now_bytes - known_bytes)
            known_bytes = now_bytes
            if rate.is_too_slow:
                raise SourceUnavailable(
                    f"source_uri: the source is too slow: {now_bytes} bytes arrived, less than "
                    f"{self._pace.bytes_per_second} per second and {self._pace.stall_seconds:g} "
                    "seconds of silence (settings min-transfer-rate and transfer-stall-seconds)",
                    subject="source_uri",
                    reason=TOO_SLOW,
                )


def in_blocks(steps: Iterable[bytes], staging: Staging) -> Iterator[bytearray]:
    """Yields a connection's data in blocks of READ_BYTES or a little more; the steps come as they
    arrive, also when it breaks. Raises as `Staging.check_cancelled` between two steps."""
    block = bytearray()
    try:
        for step in steps:
            staging.received(len(step))
            block += step
            if len(block) >= READ_BYTES:
                yield block
                block = bytearray()
    except Exception:
        if block:
            yield block
        raise
    if block:
        yield block


def copy_all(names: Iterable[str], copy: Callable[[str], None], staging: Staging) -> None:
    """Calls `copy` with each name, FILES_AT_ONCE at a time. Raises the first error, which ends the
    copies that still write to `staging` or wait on it."""
    with ThreadPoolExecutor(FILES_AT_ONCE, "copy") as pool:
        jobs = [pool.submit(copy, name) for name in names]
        wait(jobs, return_when=FIRST_EXCEPTION)
        if any(job.done() and job.exception() is not None for job in jobs):
            staging.abandon()
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [job.exception() for job in jobs if not job.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, Abandoned):
            raise error
