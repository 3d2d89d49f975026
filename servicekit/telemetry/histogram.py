"""Durations counted in buckets of fixed bounds: an observation costs less than a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_DECADES_S = tuple(
    base * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0) for base in (1, 2, 5)
)
STEP_BOUNDS_S = tuple(sorted((*_DECADES_S, 0.015, 0.03, 0.075)))
"""Steps of a computation: 10 microseconds to 5 seconds, closer where readers of a stream notice."""

WAIT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Durations that people wait for: a millisecond to a minute."""

QUEUE_BOUNDS_S = (*WAIT_BOUNDS_S, 120.0, 300.0)
"""Waits under overload: the tail must not end in the last bucket."""

REQUEST_BOUNDS_S = (*QUEUE_BOUNDS_S, 600.0, 1800.0)
"""Whole requests, whose answers may be long."""

IDLE_BOUNDS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
"""Times since something was last used."""


@dataclass(frozen=True, slots=True)
class HistogramState:
    """Counts observations per bucket: at most each bound and above the bound before, and last all
    above the highest bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float


class Histogram:
    """Counts durations. One thread writes; any thread may read `state`."""

    def __init__(self, bounds_s: tuple[float, ...] = STEP_BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Adds `count` observations of the same duration."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    @property
    def state(self) -> HistogramState:
        return HistogramState(self._bounds_s, tuple(self._counts), self._sum_s)
