"""Limits how often tenants may register. Counts in this process only: each replica grants the
rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from servicekit.errors import QuotaExceeded

_MAX_TENANTS = 10_000
_MINUTE_SECONDS = 60.0


class RateLimiter:
    """A token bucket per tenant, which holds a minute's registrations and refills evenly.
    Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._full_at: dict[str, float] = {}  # when each bucket will be full again

    def acquire(self, tenant: str, per_minute: int | None) -> None:
        """Counts one registration. Raises QuotaExceeded without counting it."""
        if per_minute is None:
            return
        interval_seconds = _MINUTE_SECONDS / per_minute
        with self._lock:
            now = self._clock()
            full_at = max(self._full_at.get(tenant, now), now) + interval_seconds
            # A bucket that was full is full again within a minute, up to rounding.
            wait_seconds = full_at - now - _MINUTE_SECONDS
            if wait_seconds > interval_seconds * 1e-6:
                raise QuotaExceeded(
                    f"registrations_per_minute: tenant {tenant!r} may register {per_minute} times "
                    f"a minute; try again in {wait_seconds:.3g} seconds",
                    subject="registrations_per_minute",
                    retry_after_s=wait_seconds,
                )
            if len(self._full_at) >= _MAX_TENANTS:
                self._forget_full(now)
            self._full_at[tenant] = full_at

    def _forget_full(self, now: float) -> None:
        self._full_at = {tenant: at for tenant, at in self._full_at.items() if at > now}
