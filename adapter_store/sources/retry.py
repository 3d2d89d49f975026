"""Trying again: exponential waits with jitter, so that many stores do not return in step."""

from __future__ import annotations

import random
from dataclasses import dataclass

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.staging import Staging

CHANGED = "SOURCE_CHANGED"
"""The reason of a failure that trying again cannot mend: the pinned moment is gone."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The n-th wait is random between 0 and first_seconds * 2^(n-1), at most max_seconds."""

    attempts: int = 6
    first_seconds: float = 0.25
    max_seconds: float = 8.0


class Retry:
    """Counts the attempts at one thing. A new Retry for each; used by one thread."""

    def __init__(self, policy: RetryPolicy, staging: Staging) -> None:
        self._policy = policy
        self._staging = staging
        self._failures = 0

    def progressed(self) -> None:
        """Something came of this attempt: what fails now is a new trouble."""
        self._failures = 0

    def failed(self, error: SourceUnavailable, at_least_seconds: float = 0.0) -> None:
        """Waits before the next attempt.

        Raises `error` if there is none, and Draining if the store shuts down meanwhile.
        """
        self._failures += 1
        if self._failures >= self._policy.attempts or error.reason == CHANGED:
            raise error
        longest = min(
            self._policy.max_seconds, self._policy.first_seconds * 2 ** (self._failures - 1)
        )
        seconds = random.uniform(0, longest)
        self._staging.wait(max(seconds, min(at_least_seconds, self._policy.max_seconds)))
