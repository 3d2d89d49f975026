"""The engine laid open for those who look for what is wrong: who holds what, and who waits.

Plain data that pickles, as the engine may live in a process of its own. No token is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SequenceDetails:
    """A request in the engine. `age_s` counts from its arrival, `adapter_wait_s` is how long it has
    waited, or did wait, for its adapter; `deadline_s` is what its caller's deadline leaves."""

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
    """Who holds which bytes of one memory: `images`, the last used first, and what is free, as
    (start, bytes). What exceeds the asked-for limit is counted only."""

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
    """An adapter on its way. `total_bytes` is 0 until the store has told; `source` sends it."""

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
    """What computes, as torch knows it."""
