"""How long steps and their phases take; measuring costs a step almost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from servicekit.telemetry.histogram import Histogram, HistogramState


class StepPhases(NamedTuple):
    """Seconds of one step's phases, in order: the batch is chosen, its inputs are prepared, it is
    computed, its tokens are sampled, and accounted for. On a device that computes in parallel with
    the host `forward` launches, and `sample` waits for the result."""

    schedule: float
    prepare: float
    forward: float
    sample: float
    settle: float


@dataclass
class StepTimes:
    """One observation each per step that computes tokens.

    `step` is from its messages taken to its outputs handed over; `host` the part of that outside of
    the model's computation. `blocked_by_load` is its delay by loads: their messages, their
    placement, and their changes to arena and table.
    """

    step: Histogram = field(default_factory=Histogram)
    host: Histogram = field(default_factory=Histogram)
    blocked_by_load: Histogram = field(default_factory=Histogram)
    phases: tuple[Histogram, ...] = field(
        default_factory=lambda: tuple(Histogram() for _ in StepPhases._fields)
    )
    _phases_s: StepPhases | None = None
    _load_s: float = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures one step and the hand-over of its outputs. Loads delay nobody in a step without
        a batch."""
        self._load_s = 0.0
        began_s = time.perf_counter()
        yield
        phases_s, self._phases_s = self._phases_s, None
        if phases_s is None:
            return
        step_s = time.perf_counter() - began_s
        self.step.observe(step_s)
        self.host.observe(max(0.0, step_s - phases_s.forward - phases_s.sample))
        self.blocked_by_load.observe(self._load_s)
        for histogram, seconds in zip(self.phases, phases_s, strict=True):
            histogram.observe(seconds)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Counts the time within as spent on loads."""
        began_s = time.perf_counter()
        yield
        self.add_load(time.perf_counter() - began_s)

    def add_load(self, seconds: float) -> None:
        """Counts time that this step spent on loads."""
        self._load_s += seconds

    def computed(self, phases: StepPhases) -> None:
        """This step has computed tokens."""
        self._phases_s = phases

    @property
    def states(self) -> dict[str, HistogramState]:
        return {
            "step_seconds": self.step.state,
            "step_host_seconds": self.host.state,
            "step_blocked_by_load_seconds": self.blocked_by_load.state,
        }

    @property
    def phase_states(self) -> dict[str, HistogramState]:
        return {
            name: histogram.state
            for name, histogram in zip(StepPhases._fields, self.phases, strict=True)
        }
