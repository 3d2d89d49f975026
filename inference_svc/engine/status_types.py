"""What the engine tells of itself: a picture, and what is resident. Plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """`tier` is "device" or "host"; times are `time.time()` seconds."""

    digest: str
    tier: str
    num_bytes: int
    rank: int
    pinned: bool
    running_requests: int
    last_used_time_s: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class HistogramState:
    """How many observations were at most each of `bounds` and above the one before, in seconds;
    the last of `counts` are those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A memory that adapters lie in. Its free bytes are in `num_free_ranges` pieces, the largest of
    `largest_free_bytes`. `hits` and `misses` are of requests that looked there, `evictions` by
    reason: all three are monotonic."""

    used_bytes: int
    capacity_bytes: int
    pinned_bytes: int
    largest_free_bytes: int
    num_free_ranges: int
    num_images: int
    hits: int
    misses: int
    evictions: dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A picture of the engine for GetServerInfo, `loadout top` and metrics.

    `memory` maps what ("weights", "kv_pages", "arena", "workspace", "host_tier", "process") to
    (used, capacity) bytes; `memory_limit_bytes` holds for the device, 0 if unknown. `process_id`
    is the engine's. `kernels` says what computes, such as "native avx512_bf16" or "torch", and
    `machine` on what.
    `counters`, `histograms` and `phases` are monotonic; `phases` are histograms by name and then by
    their label. `tiers` are "device" and perhaps "host"; `loads` counts adapters by state.
    """

    num_running: int
    num_waiting: int
    waiting_digests: tuple[str, ...]
    running_digests: tuple[str, ...]
    memory: dict[str, tuple[int, int]]
    counters: dict[str, float]
    memory_limit_bytes: int = 0
    process_id: int = 0
    kernels: str = ""
    machine: str = ""
    histograms: dict[str, HistogramState] = field(default_factory=dict)
    phases: dict[str, dict[str, HistogramState]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
