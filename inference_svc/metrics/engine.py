"""The engine's own numbers as metrics, read when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from inference_svc.engine.status_types import (
    EngineStatus,
    HistogramState,
    ResidentAdapter,
    TierStatus,
)
from inference_svc.histogram import Histogram
from inference_svc.metrics.definitions import family, sample
from inference_svc.metrics.gateway import LOADED, gateway_metrics, residency_series

TIER_GAUGES: dict[str, Callable[[TierStatus], float]] = {
    "tier_used_bytes": lambda tier: tier.used_bytes,
    "tier_capacity_bytes": lambda tier: tier.capacity_bytes,
    "tier_pinned_bytes": lambda tier: tier.pinned_bytes,
    "tier_largest_free_bytes": lambda tier: tier.largest_free_bytes,
    "tier_free_ranges": lambda tier: tier.num_free_ranges,
    "tier_images": lambda tier: tier.num_images,
    "tier_hits": lambda tier: tier.hits,
    "tier_misses": lambda tier: tier.misses,
}
"""What is shown of a tier as one number."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at one moment, `taken_time_s` in unix time. `names` maps digests to the names
    known to point to them."""

    status: EngineStatus
    residents: tuple[ResidentAdapter, ...]
    names: dict[str, list[str]]
    store_connected: bool
    taken_time_s: float


class GatewayCollector(Collector):
    """What gateways route by, alone; `snapshot` as of EngineCollector."""

    def __init__(self, max_loras: int, snapshot: Callable[[], Snapshot | None]) -> None:
        self._max_loras = max_loras
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        found = self._snapshot()
        if found is not None:
            yield from _gateway_metrics(found, self._max_loras)


class EngineCollector(Collector):
    """`snapshot` is called at every scrape; until it gives one there is nothing to show.
    `resolve_times` are the first phase of loads, which the engine knows nothing of."""

    def __init__(
        self, max_loras: int, snapshot: Callable[[], Snapshot | None], resolve_times: Histogram
    ) -> None:
        self._max_loras = max_loras
        self._snapshot = snapshot
        self._resolve_times = resolve_times

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        if snapshot is None:
            return
        status = snapshot.status
        yield from self._numbers(status)
        yield from self._histograms(status)
        yield from _tiers(status.tiers)
        yield _labelled("loads_in_progress", status.loads)
        for key, place in (("memory_used_bytes", 0), ("memory_capacity_bytes", 1)):
            yield _labelled(key, {area: sizes[place] for area, sizes in status.memory.items()})
        yield sample("store_connected", snapshot.store_connected)
        age_s = time.time() - snapshot.taken_time_s
        yield sample("snapshot_age_seconds", max(0.0, age_s))  # clocks are set back
        for made in _gateway_metrics(snapshot, self._max_loras):
            yield made
            if made.name == LOADED:
                yield residency_series(made)

    def _numbers(self, status: EngineStatus) -> Iterator[Metric]:
        for key, value in (status.counters | status.gauges).items():
            yield sample(key, value)
        yield sample("requests_running", status.num_running)
        yield sample("requests_waiting", status.num_waiting)

    def _histograms(self, status: EngineStatus) -> Iterator[Metric]:
        for key, state in status.histograms.items():
            yield _histograms(key, {"": state})
        for key, states in status.phases.items():
            own = {"resolve": self._resolve_times.state} if key == "load_phase_seconds" else {}
            yield _histograms(key, own | states)


def _gateway_metrics(snapshot: Snapshot, max_loras: int) -> Iterator[Metric]:
    return gateway_metrics(
        *(snapshot.status, snapshot.residents, snapshot.names),
        max_loras=max_loras,
        taken_time_s=snapshot.taken_time_s,
    )


def _tiers(tiers: dict[str, TierStatus]) -> Iterator[Metric]:
    for key, read in TIER_GAUGES.items():
        yield _labelled(key, {name: read(tier) for name, tier in tiers.items()})
    evictions = family("tier_evictions")
    for name, tier in tiers.items():
        for reason, count in tier.evictions.items():
            evictions.add_metric([name, reason], count)
    yield evictions


def _labelled(key: str, values: dict[str, float] | dict[str, int]) -> Metric:
    """A family of one label."""
    made = family(key)
    for label, value in values.items():
        made.add_metric([label], float(value))
    return made


def _histograms(key: str, states: dict[str, HistogramState]) -> Metric:
    """A family of one label, or of none where that is ""."""
    made = family(key)
    for label, state in states.items():
        bounds = [*map(floatToGoString, state.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(state.counts)), strict=True))
        made.add_metric([label] if label else [], buckets, state.sum_seconds)
    return made
