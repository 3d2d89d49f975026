"""Decides when to retry a failed call. Pure: callers pass in the clock and the randomness."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadout.errors import (
    LoadoutError,
    ResourceExhausted,
    StreamLost,
    Unavailable,
)

DRAINING = "DRAINING"
"""Reason of a service that is shutting down: its successor or a peer will answer."""
ENGINE_FAILED = "ENGINE_FAILED"
"""Reason of a server whose engine failed during the request."""
ASLEEP = "ASLEEP"
"""Reason of a server that has freed its memory until it is woken."""
GONE = (DRAINING, ENGINE_FAILED, ASLEEP)
"""Reasons of a server that can take no request now: another server may."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed call is tried, and how long the client waits between attempts.

    Args:
        max_attempts: Attempts of one call, at least 1. 1: never retry.
        first_backoff_s: Seconds before the first retry. Each further wait doubles, and a random
            part of up to half is cut from each.
        max_backoff_s: Most seconds of a wait.
        max_retry_after_s: If a service asks to wait for more seconds, the call fails.

    Raises:
        ValueError: `max_attempts` is below 1.
    """

    max_attempts: int = 4
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")


class Attempts:
    """The attempts of one call, counted against the policy and the call's deadline.

    Args:
        policy: How often a call is tried.
        timeout_s: Deadline in seconds over all attempts. None: none.
        clock: Returns monotonic seconds.
        chance: Returns a random number from 0 to 1.
        waits_if_gone: Whether to retry at a service that drains or sleeps.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        *,
        waits_if_gone: bool = True,
    ) -> None:
        self._policy = policy
        self._waits_if_gone = waits_if_gone
        self._clock = clock
        self._chance = chance
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._num_failed = 0
        self._num_engines = 0

    @property
    def remaining_s(self) -> float | None:
        """Returns the seconds until the deadline, at least 0; None without a deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def succeeded(self) -> None:
        """Resets the count: a stream that resumes may fail as often as a new one."""
        self._num_failed = 0

    def delay_s(
        self, error: LoadoutError, *, repeatable: bool, elsewhere: bool = False
    ) -> float | None:
        """Counts a failed attempt, and decides about the next one.

        A call refused with RetryInfo is always retried, because the service did nothing.

        Args:
            error: Error of the attempt.
            repeatable: Whether executing the call twice does no harm.
            elsewhere: Whether the next attempt goes to another replica, so that it need not wait.

        Returns:
            Seconds to wait before the next attempt, or None to give up.
        """
        self._num_failed += 1
        if self._num_failed >= self._policy.max_attempts:
            return None
        delay = self._delay_s(error, repeatable, elsewhere)
        remaining = self.remaining_s
        if delay is None or (remaining is not None and delay >= remaining):
            return None
        return delay

    def _delay_s(self, error: LoadoutError, repeatable: bool, elsewhere: bool) -> float | None:
        if error.reason in (DRAINING, ASLEEP) and not self._waits_if_gone:
            return None
        if isinstance(error, ResourceExhausted | Unavailable) and error.retry_after_s is not None:
            if elsewhere:
                return 0.0
            if error.retry_after_s > self._policy.max_retry_after_s:
                return None
            # Clients that were refused together must not come back together.
            return error.retry_after_s * (1 + 0.1 * self._chance())
        if not repeatable:
            return None
        if error.reason == ENGINE_FAILED:
            # A request that two engines failed under may be the cause: it gets no third engine.
            self._num_engines += 1
            if self._num_engines > 1:
                return None
        if isinstance(error, StreamLost) or error.reason in GONE:
            return 0.0 if elsewhere else self._backoff_s()
        return None

    def _backoff_s(self) -> float:
        doubled = self._policy.first_backoff_s * 2.0 ** (self._num_failed - 1)
        return min(doubled, self._policy.max_backoff_s) * (1 - 0.5 * self._chance())
