"""Copying an adapter's files: several at once, each with retries.

Waits between attempts grow exponentially, with jitter: many stores do not retry in step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.staging import Abandoned, Staging

FILES_AT_ONCE = 4

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


def copy_all(names: Iterable[str], copy: Callable[[str], None], staging: Staging) -> None:
    """Calls `copy` with each name, FILES_AT_ONCE at a time. The first error is raised, and ends the
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
