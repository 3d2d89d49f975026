"""When a failed call is tried again. Pure: the clock and the randomness are passed in."""

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
"""Reason of a service that refused because it stops: its successor or a peer will answer."""
ENGINE_FAILED = "ENGINE_FAILED"
"""Reason of a server whose engine ended while it had the request."""
ASLEEP = "ASLEEP"
"""Reason of a server that refused because its memory is freed until it is woken."""
GONE = (DRAINING, ENGINE_FAILED, ASLEEP)
"""Reasons of a server that cannot take anything now: another may."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is tried, and how long is waited. `RetryPolicy(max_attempts=1)` never tries
    again."""

    max_attempts: int = 4
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    """Backoffs double from the first up to this one, each cut by a random part of its half."""
    max_retry_after_s: float = 10.0
    """A RetryInfo above this ends the call."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")


class Attempts:
    """The attempts of one call, counted against the policy and the call's deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        *,
        waits_if_gone: bool = True,
    ) -> None:
        """`waits_if_gone`: whether a service that drains or sleeps is asked again."""
        self._policy = policy
        self._waits_if_gone = waits_if_gone
        self._clock = clock
        self._chance = chance
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._num_failed = 0
        self._num_engines = 0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def succeeded(self) -> None:
        """Starts counting anew: a stream that resumes may fail as often as a fresh one."""
        self._num_failed = 0

    def delay_s(
        self, error: LoadoutError, *, repeatable: bool, elsewhere: bool = False
    ) -> float | None:
        """Counts a failed attempt; returns seconds to wait before the next one, None to give up.

        `repeatable` says that a second execution does no harm. A refusal with RetryInfo is tried
        again either way, since the service did nothing. `elsewhere` says that the next attempt goes
        to another replica, so that there is nothing to wait for.
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
            # A request that was there when two engines ended may be why: it gets no third.
            self._num_engines += 1
            if self._num_engines > 1:
                return None
        if isinstance(error, StreamLost) or error.reason in GONE:
            return 0.0 if elsewhere else self._backoff_s()
        return None

    def _backoff_s(self) -> float:
        doubled = self._policy.first_backoff_s * 2.0 ** (self._num_failed - 1)
        return min(doubled, self._policy.max_backoff_s) * (1 - 0.5 * self._chance())
