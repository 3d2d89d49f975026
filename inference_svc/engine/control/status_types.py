"""The engine's status, resident adapters and details: plain data that pickles, without tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from contract.images.segment_kinds import SegmentKind
from servicekit.telemetry.histogram import HistogramState

GRAMMARS = "grammars"
"""The memory of processes for forms of answers."""


class ResidentAdapter(NamedTuple):
    """`tier` is "device" or "host"; times are `time.time()` seconds. `num_not_finite` counts
    requests and loads that ended because values with it were not finite, since the start.

    A tuple, since the engine pickles hundreds of them between two steps."""

    digest: str
    tier: str
    num_bytes: int
    rank: int
    pinned: bool
    running_requests: int
    last_used_time_s: float
    load_seconds: float
    num_not_finite: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class AdapterDetails:
    """An image in the memory of `adapter.tier`, and the operations that a step launches for it.

    `extents` are (start, bytes) there, in the image's order. The rest but `launches` are columns of
    its segments in order, since arrays pickle between two steps in no time: index of the target in
    the layout, kind, rank, where it begins in the memory, bytes. `launches` counts by group, as
    `Backend.lora_launches` does; `kernels` names the code that computes.
    """

    adapter: ResidentAdapter
    slot: int
    extents: tuple[tuple[int, int], ...]
    targets: np.ndarray
    kinds: tuple[SegmentKind, ...]
    ranks: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    launches: dict[str, int]
    kernels: str


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A memory that adapters lie in. Its free bytes are in `num_free_ranges` pieces, the largest of
    `largest_free_bytes`. `hits` and `misses` are of requests that searched it, `evictions` by
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
class RecurrentStatus:
    """The states of recurrent layers: each has `state_bytes`, for all layers. Of `capacity`,
    requests hold `used`; `stored`, used or not, can be found by a prefix. `max_stored` of them are
    not needed by running requests, and the prefix cache stores one every `interval_tokens`."""

    state_bytes: int
    interval_tokens: int
    capacity: int
    max_stored: int
    used: int
    stored: int


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One of the processes that compute a model together, as it was at its last answer to rank 0.

    `stage` has some of the model's layers, or all. `answers`: it has done so within ten seconds.
    `weights_bytes`, `kv_bytes` and `arena_bytes` are allocated. `num_steps`, `step_s`, `exchange_s`
    and `pulled_bytes` are monotonic; `exchange_s` is the part of `step_s` in exchanges, mostly of
    waiting for other ranks. `num_pulls` counts running pulls, and `processors` are the ones that
    its threads are bound to.
    """

    index: int
    process_id: int
    answers: bool
    resident_bytes: int
    weights_bytes: int
    kv_bytes: int
    arena_bytes: int
    num_steps: int
    step_s: float
    exchange_s: float
    pulled_bytes: int
    num_pulls: int
    num_threads: int
    processors: tuple[int, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine for GetServerInfo, `loadout top` and metrics.

    `memory` maps parts ("weights", "kv_pages", "arena", "workspace", "host_tier", "process"; of a
    model with recurrent layers "recurrent_states", with experts "routed_experts") to (used,
    capacity) bytes; `memory_limit_bytes` holds for the device, 0 if unknown. `process_id` is the
    engine's. `kernels` names the code that computes, such as "native avx512_bf16" or "torch", and
    `machine` the hardware. `counters`, `histograms` and `phases` are monotonic; `phases` are
    histograms by name and then by their label. `tiers` are "device" and perhaps "host"; `loads`
    counts adapters by state, and `registrations`, monotonic, mapped images by what became of them,
    where there is a device. `generation` is "running", "paused" or "asleep". `ranks` are all, or
    empty if there is one; the other figures are rank 0's.
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
    registrations: dict[str, int] = field(default_factory=dict)
    generation: str = "running"
    recurrent: RecurrentStatus | None = None
    """None: the model has no recurrent layers."""
    ranks: tuple[RankStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceDetails:
    """A request in the engine. `age_s` counts from its arrival, `adapter_wait_s` is how long it has
    waited, or did wait, for its adapter; `deadline_s` is the rest of its caller's deadline."""

    request_id: str
    tenant: str
    digest: str
    state: str
    priority: int
    age_s: float
    adapter_wait_s: float | None
    deadline_s: float | None
    slot: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_pages: int
    num_preemptions: int
    is_aged: bool


@dataclass(frozen=True, slots=True)
class ImageDetails:
    """An image in one memory. `extents` are (start, bytes) there, in the image's order."""

    digest: str
    slot: int
    extents: tuple[tuple[int, int], ...]
    rank: int
    is_ready: bool
    users: int
    pinned: bool
    draining: bool
    last_used_time_s: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class MemoryDetails:
    """The images in one memory, the last used first, and its free ranges as (start, bytes). Those
    beyond the limit are counted only."""

    capacity_bytes: int
    used_bytes: int
    max_images: int
    num_images: int
    images: tuple[ImageDetails, ...]
    num_free_ranges: int
    free_ranges: tuple[tuple[int, int], ...]
    largest_admissible_bytes: int


@dataclass(frozen=True, slots=True)
class LoadDetails:
    """An adapter that is being loaded. `total_bytes` is 0 until the store has sent it; `source` is
    the replica that sends."""

    digest: str
    state: str
    age_s: float
    num_waiters: int
    total_bytes: int
    verified_bytes: int
    source: str
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class EngineDetails:
    """`memories` are "device", the arena, and where there is one "host"."""

    memories: dict[str, MemoryDetails]
    running: tuple[SequenceDetails, ...]
    num_waiting: int
    waiting: tuple[SequenceDetails, ...]
    num_loads: int
    loads: tuple[LoadDetails, ...]
    device: dict[str, object] = field(default_factory=dict)
    """The device, by torch's name."""
