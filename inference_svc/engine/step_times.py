"""Where the time of steps goes, in numbers that cost a step almost nothing to keep."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inference_svc.core import HistogramState

_BOUNDS_S = tuple(
    base * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0) for base in (1, 2, 5)
)
"""From 10 microseconds to 5 seconds."""


class Histogram:
    """Seconds, counted in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    @property
    def state(self) -> HistogramState:
        return HistogramState(_BOUNDS_S, tuple(self._counts), self._sum_s)


@dataclass
class StepTimes:
    """One observation each per step, a turn that computes tokens.

    `step` is the whole turn, from its messages taken to its outputs handed over; `host` what of it
    is not the model's computation: schedule, inputs, settle, say. `blocked_by_load` is what loads
    cost it: their messages, their room, and their changes to arena and table.
    """

    step: Histogram = field(default_factory=Histogram)
    host: Histogram = field(default_factory=Histogram)
    blocked_by_load: Histogram = field(default_factory=Histogram)
    _began_s: float = 0.0
    _compute_s: float | None = None
    _load_s: float = 0.0

    def begin(self) -> None:
        """A turn begins. What loads cost turns without a step does not delay any."""
        self._began_s, self._compute_s, self._load_s = time.perf_counter(), None, 0.0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, loads are looked after."""
        began_s = time.perf_counter()
        yield
        self._load_s += time.perf_counter() - began_s

    def changed(self, seconds: float) -> None:
        """Arena and table have been changed for so long in this turn."""
        self._load_s += seconds

    def computed(self, seconds: float) -> None:
        """The model has computed for so long in this turn."""
        self._compute_s = seconds

    def end(self) -> None:
        """The turn's outputs have been handed over."""
        compute_s, self._compute_s = self._compute_s, None
        if compute_s is None:
            return
        step_s = time.perf_counter() - self._began_s
        self.step.observe(step_s)
        self.host.observe(max(0.0, step_s - compute_s))
        self.blocked_by_load.observe(self._load_s)

    @property
    def states(self) -> dict[str, HistogramState]:
        return {
            "step_seconds": self.step.state,
            "step_host_seconds": self.host.state,
            "step_blocked_by_load_seconds": self.blocked_by_load.state,
        }
