"""The engine's metrics, made of a snapshot that each scrape asks the engine for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client.core import Metric

from inference_svc.core import ANYONE
from inference_svc.engine.control.status_types import (
    EngineStatus,
    RankStatus,
    ResidentAdapter,
    TierStatus,
)
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.metrics.definitions import DEFINITIONS
from inference_svc.metrics.gateway_routing import LOADED, gateway_metrics, residency_series
from inference_svc.store.adapter_resolver import Directory
from servicekit.errors import ServiceError
from servicekit.refs import short_name
from servicekit.telemetry.histogram import HistogramState

ANSWER_SECONDS = 2.0
"""An engine whose step takes longer is shown as at the last scrape, with the snapshot's age."""
MAX_RESIDENTS = 512
"""Resident adapters requested beyond those on the device: the engine lists them between steps."""
MAX_NAMES = 16
"""Names shown per adapter."""

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
"""A tier's metrics without further labels."""
RANK_FIGURES: dict[str, Callable[[RankStatus], float]] = {
    "rank_up": lambda rank: rank.answers,
    "rank_resident_bytes": lambda rank: rank.resident_bytes,
    "rank_steps": lambda rank: rank.num_steps,
    "rank_step_seconds": lambda rank: rank.step_s,
    "rank_exchange_seconds": lambda rank: rank.exchange_s,
    "rank_pulled_bytes": lambda rank: rank.pulled_bytes,
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Describes the engine at `taken_time_s`, a unix time. `names` maps digests to the names that
    point to them, in full. `store_connected` is None for a server that has left the store."""

    status: EngineStatus
    residents: tuple[ResidentAdapter, ...]
    names: dict[str, list[str]]
    store_connected: bool | None
    taken_time_s: float


class Snapshots:
    """Asks the engine for snapshots, from any thread but the event loop's. At most `max_loras`
    adapters are on the device."""

    def __init__(self, max_loras: int) -> None:
        self._lock = threading.Lock()
        self._pending: futures.Future[None] | None = None
        self._max_residents = max(MAX_RESIDENTS, max_loras)
        self._source: tuple[asyncio.AbstractEventLoop, AsyncEngine, Directory] | None = None
        self._last: Snapshot | None = None

    def attach(self, engine: AsyncEngine, directory: Directory) -> None:
        """Starts to ask this engine; before, there are no snapshots. Call it on the event loop."""
        self._source = asyncio.get_running_loop(), engine, directory

    def detach(self) -> None:
        """Stops asking the engine, which is about to end; the last snapshot stays."""
        self._source = None

    def read(self) -> Snapshot | None:
        """Returns a new snapshot, or the last one if the engine does not answer in time."""
        pending = self._request()
        if pending is not None:
            done = futures.wait([pending], ANSWER_SECONDS).done
            if done and not pending.cancelled():  # else the server has ended
                pending.result()
        return self._last

    def _request(self) -> futures.Future[None] | None:
        """Sends one request at a time, however many scrapes there are: an engine that hangs must
        not find thousands, and one in a long step answers after the scraper has left."""
        with self._lock:
            source = self._source
            if source is not None and (self._pending is None or self._pending.done()):
                loop, engine, directory = source
                updating = self._update(engine, directory)
                self._pending = asyncio.run_coroutine_threadsafe(updating, loop)
            return self._pending if source is not None else None

    async def _update(self, engine: AsyncEngine, directory: Directory) -> None:
        with suppress(ServiceError):  # the engine has failed; the process is about to end
            self._last = await _take_snapshot(engine, directory, self._max_residents)


async def _take_snapshot(engine: AsyncEngine, directory: Directory, max_residents: int) -> Snapshot:
    status, residents = await asyncio.gather(
        engine.calls.describe(), engine.calls.list_resident(max_residents)
    )
    digests = {adapter.digest for adapter in residents}
    digests.update(status.running_digests, status.waiting_digests)
    return Snapshot(
        status,
        residents,
        {digest: directory.names_of(ANYONE, digest, MAX_NAMES) for digest in digests},
        None if directory.has_left else directory.is_live,
        time.time(),
    )


def _short_names(names: list[str]) -> list[str]:
    """Returns names as clients write them; versions only where no unversioned name exists."""
    unversioned = [name for name in names if "@" not in name]
    return [short_name(name) for name in unversioned or names]


def engine_metrics(
    snapshot: Snapshot, max_loras: int, resolve_times: HistogramState
) -> Iterator[Metric]:
    """Yields all families of a snapshot. `resolve_times` are the first phase of loads, which
    happens before the engine."""
    status = snapshot.status
    yield from _numbers(status)
    yield from _histograms(status, resolve_times)
    yield from _tiers(status.tiers)
    for key, read in RANK_FIGURES.items():
        figures = {(str(rank.index), str(rank.stage)): read(rank) for rank in status.ranks}
        yield DEFINITIONS.samples(key, figures)
    yield _by_label("loads_in_progress", status.loads)
    yield _by_label("registered_images", status.registrations)
    for key, place in (("memory_used_bytes", 0), ("memory_capacity_bytes", 1)):
        yield _by_label(key, {area: sizes[place] for area, sizes in status.memory.items()})
    if snapshot.store_connected is not None:
        yield DEFINITIONS.sample("store_connected", snapshot.store_connected)
    age_s = time.time() - snapshot.taken_time_s
    yield DEFINITIONS.sample("snapshot_age_seconds", max(0.0, age_s))  # clocks are set back
    for made in snapshot_gateway_metrics(snapshot, max_loras):
        yield made
        if made.name == LOADED:
            yield residency_series(made)


def snapshot_gateway_metrics(snapshot: Snapshot, max_loras: int) -> Iterator[Metric]:
    # Here and not where the snapshot is taken: on the event loop all calls wait.
    names = {digest: _short_names(found) for digest, found in snapshot.names.items()}
    return gateway_metrics(
        snapshot.status,
        snapshot.residents,
        names,
        max_loras=max_loras,
        taken_time_s=snapshot.taken_time_s,
    )


def _numbers(status: EngineStatus) -> Iterator[Metric]:
    for key, value in (status.counters | status.gauges).items():
        yield DEFINITIONS.sample(key, value)
    yield DEFINITIONS.sample("requests_running", status.num_running)
    yield DEFINITIONS.sample("requests_waiting", status.num_waiting)


def _histograms(status: EngineStatus, resolve_times: HistogramState) -> Iterator[Metric]:
    for key, state in status.histograms.items():
        yield DEFINITIONS.histograms(key, {(): state})
    for key, states in status.phases.items():
        own = {"resolve": resolve_times} if key == "load_phase_seconds" else {}
        yield DEFINITIONS.histograms(
            key, {(label,): state for label, state in (own | states).items()}
        )


def _tiers(tiers: dict[str, TierStatus]) -> Iterator[Metric]:
    for key, read in TIER_GAUGES.items():
        yield _by_label(key, {name: read(tier) for name, tier in tiers.items()})
    evictions = {
        (name, reason): float(count)
        for name, tier in tiers.items()
        for reason, count in tier.evictions.items()
    }
    yield DEFINITIONS.samples("tier_evictions", evictions)


def _by_label(key: str, values: Mapping[str, float]) -> Metric:
    """Returns a family of one label."""
    return DEFINITIONS.samples(key, {(label,): value for label, value in values.items()})
