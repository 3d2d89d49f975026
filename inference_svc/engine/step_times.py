"""Where the time of steps goes, in numbers that cost a step almost nothing to keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_svc.engine.status_types import HistogramState
from inference_svc.histogram import Histogram


class StepPhases(NamedTuple):
    """Seconds of one step, in order: who runs is decided, the step is described to what computes
    it, computed, its tokens are chosen, and accounted for. On a device that computes beside us
    `forward` launches, and `sample` waits for what was launched."""

    schedule: float
    prepare: float
    forward: float
    sample: float
    settle: float


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
    phases: tuple[Histogram, ...] = field(
        default_factory=lambda: tuple(Histogram() for _ in StepPhases._fields)
    )
    _began_s: float = 0.0
    _phases_s: StepPhases | None = None
    _load_s: float = 0.0

    def begin(self) -> None:
        """A turn begins. What loads cost turns without a step does not delay any."""
        self._began_s, self._phases_s, self._load_s = time.perf_counter(), None, 0.0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, loads are looked after."""
        began_s = time.perf_counter()
        yield
        self._load_s += time.perf_counter() - began_s

    def changed(self, seconds: float) -> None:
        """Arena and table have been changed for so long in this turn."""
        self._load_s += seconds

    def stepped(self, phases: StepPhases) -> None:
        """Tokens have been computed in this turn."""
        self._phases_s = phases

    def end(self) -> None:
        """The turn's outputs have been handed over."""
        phases_s, self._phases_s = self._phases_s, None
        if phases_s is None:
            return
        step_s = time.perf_counter() - self._began_s
        self.step.observe(step_s)
        self.host.observe(max(0.0, step_s - phases_s.forward - phases_s.sample))
        self.blocked_by_load.observe(self._load_s)
        for histogram, seconds in zip(self.phases, phases_s, strict=True):
            histogram.observe(seconds)

    @property
    def states(self) -> dict[str, HistogramState]:
        return {
            "step_seconds": self.step.state,
            "step_host_seconds": self.host.state,
            "step_blocked_by_load_seconds": self.blocked_by_load.state,
        }

    @property
    def phase_states(self) -> dict[str, HistogramState]:
        """By phase."""
        return {
            name: histogram.state
            for name, histogram in zip(StepPhases._fields, self.phases, strict=True)
        }
