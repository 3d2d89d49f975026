"""Metrics of loads: counts, how long each phase took, and spans for traced requests."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.pulls.pull import PullJob
from servicekit.telemetry.histogram import IDLE_BOUNDS_S, WAIT_BOUNDS_S, Histogram
from servicekit.telemetry.spans import CANCELLED, OpenSpan, Span, SpanContext


@dataclass
class LoadCounters:
    """Monotonic counts: requests that found their adapter on the device, in the host tier, or
    nowhere; pulls by outcome, and attempts whose bytes failed their hash."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    pulls_done: int = 0
    pulls_failed: int = 0
    pulls_corrupt: int = 0
    pulled_bytes: int = 0


class LoadSource(enum.Enum):
    """Where a load took the bytes from: the host tier had them, or the store sent them."""

    HOST = "host"
    STORE = "store"


def _wait_histogram() -> Histogram:
    return Histogram(WAIT_BOUNDS_S)


def _histogram_by_source() -> dict[LoadSource, Histogram]:
    return {source: _wait_histogram() for source in LoadSource}


def _idle_histogram() -> Histogram:
    return Histogram(IDLE_BOUNDS_S)


@dataclass
class LoadTimes:
    """Histograms with one observation per load.

    `load` is from the first waiter until requests could run, by source: loads from the host tier
    are many and short, and would hide the store's time. Of that, `wait` is for a pull thread and
    for memory, `pull` until the bytes were here, `copy` from the host tier into the arena.
    Prefetches count in `pull` only.

    `device_idle` and `host_idle`: how long images had not been used when they were evicted.
    """

    load: dict[LoadSource, Histogram] = field(default_factory=_histogram_by_source)
    wait: Histogram = field(default_factory=_wait_histogram)
    pull: Histogram = field(default_factory=_wait_histogram)
    copy: Histogram = field(default_factory=_wait_histogram)
    device_idle: Histogram = field(default_factory=_idle_histogram)
    host_idle: Histogram = field(default_factory=_idle_histogram)

    def observe_pulled_load(self, load_s: float, waited_s: float) -> None:
        """Records a load that was pulled straight into the arena."""
        self.load[LoadSource.STORE].observe(load_s)
        self.wait.observe(waited_s)

    def observe_device_eviction(self, resident: Resident) -> None:
        _observe_idle(self.device_idle, resident)

    def observe_host_eviction(self, resident: Resident) -> None:
        _observe_idle(self.host_idle, resident)


def _observe_idle(histogram: Histogram, resident: Resident) -> None:
    if resident.last_used_time_s:  # else it was prefetched, and never used
        histogram.observe(max(0.0, time.time() - resident.last_used_time_s))


@dataclass(eq=False, slots=True)
class _TracedLoad:
    """`phases` are the ones that have not ended, the outer one first."""

    load: OpenSpan
    phases: list[OpenSpan] = field(default_factory=list)
    jobs: list[PullJob] = field(default_factory=list)

    def start(self, name: str, now_s: float) -> OpenSpan:
        outer = self.phases[-1] if self.phases else self.load
        self.phases.append(outer.child(name, start_s=now_s))
        return self.phases[-1]

    def end(self, now_s: float, *names: str) -> None:
        """Ends the innermost phases as long as they have one of these names."""
        while self.phases and self.phases[-1].name in names:
            self.phases.pop().end(now_s)


class LoadTraces:
    """Spans of the loads that traced requests wait for, by digest; empty where nothing is traced.

    load: wait (for a pull thread or memory), pull (PullAdapter for each attempt, wait), copy

    Owned by the engine's thread; times are seconds on the monotonic clock. All but `start` and
    `link` ignore a digest that is not traced.
    """

    def __init__(self) -> None:
        self._by_digest: dict[str, _TracedLoad] = {}
        self._spans: list[Span] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def pop_spans(self) -> tuple[Span, ...]:
        """Returns the spans of loads that ended since the last call."""
        if not self._spans:
            return ()
        popped = tuple(self._spans)
        self._spans.clear()
        return popped

    def start(self, digest: str, parent: SpanContext, now_s: float) -> None:
        """Traces a load from now on, as a part of `parent`."""
        context = parent.child()
        load = OpenSpan("load", "internal", context, parent.span_id, self._spans.append, now_s)
        load.set_attributes(digest=digest)
        self._by_digest[digest] = _TracedLoad(load)

    def link(self, digest: str, parent: SpanContext) -> SpanContext | None:
        """Returns the span of a traced load, to be linked to; None if it is part of `parent`."""
        load = self._by_digest[digest].load
        return None if load.parent_id == parent.span_id else load.context

    def on_wait(self, digest: str, now_s: float) -> None:
        """Starts a wait for a pull thread or, within a pull, for memory."""
        if traced := self._by_digest.get(digest):
            traced.end(now_s, "wait")
            traced.start("wait", now_s)

    def on_pull_room(self, digest: str, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.end(now_s, "wait")

    def on_pull(self, digest: str, job: PullJob, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.end(now_s, "wait", "pull")
            job.trace = traced.start("pull", now_s)
            traced.jobs.append(job)

    def on_pulled(self, digest: str, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.end(now_s, "wait", "pull")

    def on_copy(self, digest: str, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.end(now_s, "wait", "pull")
            traced.start("copy", now_s)

    def note(self, digest: str, error: Exception | None = None, **facts: str | int) -> None:
        """Adds attributes to the load's span, or the error that it failed with."""
        if traced := self._by_digest.get(digest):
            traced.load.set_attributes(**facts)
            if error is not None:
                traced.load.fail(error)

    def end(self, digest: str, now_s: float, *, is_resident: bool) -> None:
        """Ends a load's span; without `is_resident` or an error as cancelled."""
        traced = self._by_digest.pop(digest, None)
        if traced is None:
            return
        traced.end(now_s, "wait", "pull", "copy")
        for job in traced.jobs:
            self._spans += job.spans
        if not is_resident and not traced.load.error:
            traced.load.attributes[CANCELLED] = True
        traced.load.end(now_s)
