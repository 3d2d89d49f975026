"""The figures of `loadout top`: one sample of the system, and the rates since the one before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from loadout.errors import LoadoutError
from loadout.prometheus import Metrics, quantile
from loadout.types import ResidentAdapter, ServerInfo, StoreStatus

PREFIX = "loadout_inference_"
MERGED = ("former", "other")
"""Values of the label `adapter` that stand for many adapters."""
RATES = {
    "requests_per_second": "requests_total",
    "tokens_per_second": "sampled_tokens_total",
    "prompt_tokens_per_second": "prompt_tokens_total",
    "rejections_per_second": "rejections_total",
    "pulls_per_second": "pulls_total",
    "pulled_bytes_per_second": "pulled_bytes_total",
    "pull_failures_per_second": "pull_failures_total",
}
LATENCIES = ("first_token_seconds", "inter_token_seconds", "adapter_wait_seconds")


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the system; a part that did not answer is an error in its place. `time_s` is of
    the monotonic clock."""

    server: ServerInfo | LoadoutError
    residents: tuple[ResidentAdapter, ...] | LoadoutError
    metrics: Metrics | LoadoutError
    store: StoreStatus | LoadoutError
    time_s: float

    @property
    def errors(self) -> list[LoadoutError]:
        parts = (self.server, self.residents, self.metrics, self.store)
        return [each for each in parts if isinstance(each, LoadoutError)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class AdapterRates:
    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Tier:
    """Counts are since the start of the server; `hit_rate` is None before the first lookup."""

    used_bytes: int
    capacity_bytes: int
    pinned_bytes: int
    adapters: int
    evictions: int
    hit_rate: float | None
    fragmented: float
    """Share of the free bytes that lies outside the largest free range."""


@dataclass(frozen=True, slots=True)
class StateUse:
    """How many recurrent states requests hold, a prefix can match, and there are."""

    used: int
    stored: int
    capacity: int


@dataclass(frozen=True, slots=True)
class RankRates:
    """Seconds per step that a rank computed, and waited for the others."""

    computing_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """The metrics' values. `rates` and `latencies` are of the time between two samples, and empty
    in the first one; latencies without observations are left out."""

    running: int
    waiting: int
    waiting_for_adapter: int
    rates: dict[str, float]
    latencies: dict[str, Quantiles]
    loads: dict[str, int]
    """Number of adapter loads in progress by state."""
    states: StateUse | None
    """None for models without recurrent layers."""
    tiers: dict[str, Tier]
    store_replicas: dict[str, bool]
    """Health by address."""
    is_watching: bool
    adapters: dict[str, AdapterRates]
    """Rates by name, the most tokens first, without idle ones."""
    ranks: dict[str, RankRates]
    """By index, without idle ones; empty unless several processes compute one model."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that `loadout top` shows; errors stand in place of missing answers."""

    time: datetime
    server: ServerInfo | LoadoutError
    traffic: Traffic | LoadoutError
    residents: tuple[ResidentAdapter, ...] | LoadoutError
    store: StoreStatus | LoadoutError


def overview(now: Sample, before: Sample | None = None) -> Overview:
    traffic: Traffic | LoadoutError
    if isinstance(now.metrics, Metrics):
        seconds, earlier = 0.0, None
        if before is not None and isinstance(before.metrics, Metrics):
            seconds, earlier = now.time_s - before.time_s, before.metrics
        traffic = _traffic(now.metrics, earlier, seconds)
    else:
        traffic = now.metrics
    residents = now.residents
    if not isinstance(residents, LoadoutError):
        residents = tuple(sorted(residents, key=lambda each: (-each.running_requests, _idle(each))))
    return Overview(datetime.now(UTC), now.server, traffic, residents, now.store)


def idle_s(resident: ResidentAdapter) -> float:
    """Returns seconds since the adapter's last request; 0 while one runs."""
    if resident.last_used_time is None or resident.running_requests:
        return 0.0
    return max(0.0, (datetime.now(UTC) - resident.last_used_time).total_seconds())


def _idle(resident: ResidentAdapter) -> float:
    return float("inf") if resident.last_used_time is None else idle_s(resident)


def _traffic(now: Metrics, before: Metrics | None, seconds: float) -> Traffic:
    rates: dict[str, float] = {}
    latencies: dict[str, Quantiles] = {}
    adapters: dict[str, AdapterRates] = {}
    ranks: dict[str, RankRates] = {}
    if before is not None and seconds > 0:
        rates = {name: rate(now, before, seconds, counter) for name, counter in RATES.items()}
        latencies = dict(_latencies(now, before))
        adapters = _adapter_rates(now, before, seconds)
        ranks = dict(_rank_rates(now, before))
    return Traffic(
        running=int(now.sum("vllm:num_requests_running")),
        waiting=int(now.sum("vllm:num_requests_waiting")),
        waiting_for_adapter=int(now.sum(f"{PREFIX}requests_waiting_for_adapter")),
        rates=rates,
        latencies=latencies,
        loads={
            each.labels.get("state", ""): int(each.value)
            for each in now.select(f"{PREFIX}loads_in_progress")
            if each.value
        },
        states=_states(now),
        tiers={
            each.labels.get("tier", ""): _tier(now, each.labels.get("tier", ""))
            for each in now.select(f"{PREFIX}tier_capacity_bytes")
        },
        store_replicas={
            each.labels.get("replica", ""): bool(each.value)
            for each in now.select(f"{PREFIX}store_replicas_healthy")
        },
        is_watching=bool(now.sum(f"{PREFIX}store_connected")),
        adapters=adapters,
        ranks=ranks,
    )


def rate(now: Metrics, before: Metrics, seconds: float, counter: str, **labels: str) -> float:
    """Returns the growth of a counter per second; 0 after a restart of the server."""
    grown = now.sum(f"{PREFIX}{counter}", **labels) - before.sum(f"{PREFIX}{counter}", **labels)
    return max(0.0, grown) / seconds


def _latencies(now: Metrics, before: Metrics) -> Iterable[tuple[str, Quantiles]]:
    for name in LATENCIES:
        p50, p99 = (quantile(share, now, before, f"{PREFIX}{name}") for share in (0.5, 0.99))
        if p50 is not None and p99 is not None:
            yield name, Quantiles(p50, p99)


def _adapter_rates(now: Metrics, before: Metrics, seconds: float) -> dict[str, AdapterRates]:
    found = {}
    for sample in now.select(f"{PREFIX}adapter_generated_tokens_total"):
        name = sample.labels.get("adapter", "")
        requests, tokens = (
            rate(now, before, seconds, f"adapter_{counter}_total", adapter=name)
            for counter in ("requests", "generated_tokens")
        )
        if (requests or tokens) and name not in MERGED:
            found[name] = AdapterRates(requests, tokens)
    return dict(sorted(found.items(), key=lambda each: -each[1].tokens_per_second))


def _rank_rates(now: Metrics, before: Metrics) -> Iterable[tuple[str, RankRates]]:
    for sample in now.select(f"{PREFIX}rank_up"):
        rank = sample.labels.get("rank", "")
        # A rank's counters are of one moment, which is not the sample's.
        num_steps, step_s, waiting_s = (
            rate(now, before, 1.0, f"rank_{counter}_total", rank=rank)
            for counter in ("steps", "step_seconds", "exchange_seconds")
        )
        if num_steps:
            yield rank, RankRates(max(0.0, step_s - waiting_s) / num_steps, waiting_s / num_steps)


def _states(metrics: Metrics) -> StateUse | None:
    used, stored, capacity = (
        int(metrics.sum(f"{PREFIX}recurrent_states_{name}"))
        for name in ("used", "stored", "capacity")
    )
    return StateUse(used, stored, capacity) if capacity else None


def _tier(metrics: Metrics, tier: str) -> Tier:
    def value(name: str) -> int:
        return int(metrics.sum(f"{PREFIX}tier_{name}", tier=tier))

    lookups = value("hits_total") + value("misses_total")
    free_bytes = value("capacity_bytes") - value("used_bytes")
    return Tier(
        used_bytes=value("used_bytes"),
        capacity_bytes=value("capacity_bytes"),
        pinned_bytes=value("pinned_bytes"),
        adapters=value("images"),
        evictions=value("evictions_total"),
        hit_rate=value("hits_total") / lookups if lookups else None,
        fragmented=1 - value("largest_free_bytes") / free_bytes if free_bytes > 0 else 0.0,
    )
