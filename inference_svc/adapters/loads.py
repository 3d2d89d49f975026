"""Adapters on their way: each in one state, and what moves it to the next."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inference_svc.adapters.pull_job import PullJob
from inference_svc.adapters.store import ImageHeader


class LoadState(enum.Enum):
    """NEEDS_LAYOUT -> PULLING <-> NEEDS_PULL_ROOM -> done, or with a host tier NEEDS_DEVICE_ROOM.

    NEEDS_LAYOUT: the store does not know our layout yet. PULLING: the store is at work.
    NEEDS_PULL_ROOM: the size is known, and the memory that pulls write to is full.
    NEEDS_DEVICE_ROOM: the image lies in the host tier, held there, and the arena is full.
    """

    NEEDS_LAYOUT = "needs_layout"
    PULLING = "pulling"
    NEEDS_PULL_ROOM = "needs_pull_room"
    NEEDS_DEVICE_ROOM = "needs_device_room"


@dataclass(eq=False, slots=True)
class Load:
    """One digest on its way. Times are seconds on the monotonic clock.

    `store_wait_since_s` is when it began to wait for the store, moved forward by the time that it
    waited for room instead. `room_wait_since_s` is set while it waits for room. `header` is known
    once the pull has opened.
    """

    started_s: float
    store_wait_since_s: float
    state: LoadState = LoadState.NEEDS_LAYOUT
    job: PullJob | None = None
    header: ImageHeader | None = None
    room_wait_since_s: float | None = None

    @property
    def needs_room(self) -> bool:
        return self.state in (LoadState.NEEDS_PULL_ROOM, LoadState.NEEDS_DEVICE_ROOM)

    @property
    def waits_on_store(self) -> bool:
        return self.state in (LoadState.NEEDS_LAYOUT, LoadState.PULLING)

    @property
    def last_progress_s(self) -> float | None:
        """When bytes last arrived, or the load began; None while it does not wait on the store."""
        if not self.waits_on_store:
            return None
        return self.store_wait_since_s if self.job is None else self.job.last_progress_s

    @property
    def is_cancelled(self) -> bool:
        return self.job is not None and self.job.is_cancelled

    def pull(self, job: PullJob) -> None:
        self.state, self.job = LoadState.PULLING, job

    def wait_for_room(self, state: LoadState, now_s: float) -> None:
        self.state, self.room_wait_since_s = state, now_s
        assert self.needs_room

    def got_pull_room(self, now_s: float) -> None:
        assert self.state is LoadState.NEEDS_PULL_ROOM
        assert self.room_wait_since_s is not None
        self.store_wait_since_s += now_s - self.room_wait_since_s
        self.state, self.room_wait_since_s = LoadState.PULLING, None


@dataclass
class LoadCounters:
    """Monotonic counts: requests that found their adapter on the device, in the host tier, or
    nowhere; pulls by outcome."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    pulls_done: int = 0
    pulls_failed: int = 0
    pulled_bytes: int = 0
    load_seconds: float = 0.0
