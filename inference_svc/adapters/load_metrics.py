"""How long adapters took to come, what that was spent on, and how soon they left again."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from inference_svc.adapters.slots import Resident
from inference_svc.engine.status_types import HistogramState
from inference_svc.histogram import IDLE_BOUNDS_S, WAIT_BOUNDS_S, Histogram


class LoadSource(enum.Enum):
    """Where a load took the bytes from: the host tier had them, or the store sent them."""

    HOST = "host"
    STORE = "store"


def _waits() -> Histogram:
    return Histogram(WAIT_BOUNDS_S)


def _loads() -> dict[LoadSource, Histogram]:
    return {source: _waits() for source in LoadSource}


def _idles() -> Histogram:
    return Histogram(IDLE_BOUNDS_S)


@dataclass
class LoadTimes:
    """One observation each per load. `load` is from the wish until requests could run, by source:
    loads from the host tier are many and short, and would hide what the store takes. Of that `wait`
    is for a turn and for room, `pull` until the bytes were here, `copy` from the host tier into the
    arena. Only `pull` knows of what nobody had asked for.

    `device_idle` and `host_idle`: how long what was evicted there had not been used.
    """

    load: dict[LoadSource, Histogram] = field(default_factory=_loads)
    wait: Histogram = field(default_factory=_waits)
    pull: Histogram = field(default_factory=_waits)
    copy: Histogram = field(default_factory=_waits)
    device_idle: Histogram = field(default_factory=_idles)
    host_idle: Histogram = field(default_factory=_idles)

    def loaded(self, load_s: float, waited_s: float) -> None:
        """It has been pulled to where requests can run with it."""
        self.load[LoadSource.STORE].observe(load_s)
        self.wait.observe(waited_s)

    def left_device(self, resident: Resident) -> None:
        """It has been evicted from the arena."""
        _observe_idle(self.device_idle, resident)

    def left_host(self, resident: Resident) -> None:
        """It has been evicted from the host tier."""
        _observe_idle(self.host_idle, resident)

    @property
    def load_states(self) -> dict[str, HistogramState]:
        """By source."""
        return {source.value: histogram.state for source, histogram in self.load.items()}

    @property
    def phase_states(self) -> dict[str, HistogramState]:
        return {"wait": self.wait.state, "pull": self.pull.state, "copy": self.copy.state}


def _observe_idle(histogram: Histogram, resident: Resident) -> None:
    if resident.last_used_time_s:  # else it was brought ahead, and nobody came
        histogram.observe(max(0.0, time.time() - resident.last_used_time_s))
