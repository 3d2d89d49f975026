"""Adapters on their way: each in one state, and the transitions between them."""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from contract.images.header import ImageHeader
from inference_svc.adapters.load_metrics import LoadSource, LoadTraces
from inference_svc.adapters.pulls.pull import PullJob
from inference_svc.errors import TRY_LATER, TRY_LATER_SEE_LOG
from servicekit.telemetry.spans import SpanContext

SLOW_PULL_BYTES_PER_S = 16 << 20
"""How slowly an image may arrive without using up the time that requests wait for the store: as one
of several large ones over a gigabit per second, or beside steps on all processors of a machine."""


class LoadState(enum.Enum):
    """QUEUED -> PULLING <-> NEEDS_PULL_ROOM -> ended, or with a host tier NEEDS_DEVICE_ROOM.

    QUEUED: others are pulled first, or the store does not know our layout yet.
    PULLING: the store is at work.
    NEEDS_PULL_ROOM: the size is known, and the tier that pulls write to is full.
    NEEDS_DEVICE_ROOM: the image is pinned in the host tier, and the arena is full.
    """

    QUEUED = "queued"
    PULLING = "pulling"
    NEEDS_PULL_ROOM = "needs_pull_room"
    NEEDS_DEVICE_ROOM = "needs_device_room"


@dataclass(eq=False, slots=True)
class Load:
    """One adapter on its way. Times are seconds on the monotonic clock.

    `store_wait_since_s` is when it began to wait for the store, moved forward by the time that it
    waited for memory instead, and by the time that an image of its size may take to arrive.
    `room_wait_since_s` is set while it waits for memory. `header` is known once the pull has
    opened; `granted_s` is when that got memory to write to, None before. `waited_s` is how long it
    has waited for a pull thread and for memory so far.
    """

    started_s: float
    store_wait_since_s: float
    state: LoadState = LoadState.QUEUED
    job: PullJob | None = None
    header: ImageHeader | None = None
    room_wait_since_s: float | None = None
    granted_s: float | None = None
    waited_s: float = 0.0

    @property
    def needs_room(self) -> bool:
        return self.state in (LoadState.NEEDS_PULL_ROOM, LoadState.NEEDS_DEVICE_ROOM)

    @property
    def source(self) -> LoadSource:
        """Where the bytes came from; known once the load needs only room on the device."""
        return LoadSource.HOST if self.granted_s is None else LoadSource.STORE

    @property
    def is_cancelled(self) -> bool:
        return self.job is not None and self.job.is_cancelled

    def wait_reason(self, now_s: float) -> str:
        """See Residency.wait_reason."""
        if self.job is None:
            return f"other adapters are pulled first; {TRY_LATER}"
        failure = self.job.failure
        if failure is not None:
            failed_for_s = max(0.0, now_s - self.job.failed_s)
            return f"{failure.message}, for {failed_for_s:.0f} s now; {TRY_LATER_SEE_LOG}"
        if self.header is None:
            return f"the adapter store has not sent any of it yet; {TRY_LATER}"
        arrived = f"{self.job.progress.offset:,} of {self.header.total_bytes:,} bytes"
        return f"its pull is under way, {arrived} have arrived; {TRY_LATER}"

    def wait_for_room(self, state: LoadState, now_s: float) -> None:
        self.state, self.room_wait_since_s = state, now_s
        assert self.needs_room

    def on_pull_room(self, now_s: float) -> None:
        assert self.state is LoadState.NEEDS_PULL_ROOM
        assert self.room_wait_since_s is not None
        room_wait_s = now_s - self.room_wait_since_s
        assert self.header is not None
        arrival_s = self.header.total_bytes / SLOW_PULL_BYTES_PER_S
        self.store_wait_since_s += room_wait_s + arrival_s
        self.waited_s += room_wait_s
        self.state, self.room_wait_since_s, self.granted_s = LoadState.PULLING, None, now_s


@dataclass
class Loads:
    """All loads by digest, with indices of the queued ones, the ones that need room (in order of
    arrival) and the ones that proceed without a waiter."""

    by_digest: dict[str, Load] = field(default_factory=dict)
    queued: dict[str, None] = field(default_factory=dict)
    short: dict[LoadState, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    traces: LoadTraces = field(default_factory=LoadTraces)
    _short_s: float = -math.inf
    """Time at which a pull last waited for memory."""
    _without_waiter: set[str] = field(default_factory=set)

    def __contains__(self, digest: str) -> bool:
        return digest in self.by_digest

    def __getitem__(self, digest: str) -> Load:
        return self.by_digest[digest]

    def get(self, digest: str) -> Load | None:
        return self.by_digest.get(digest)

    # Transitions.

    def begin(self, digest: str, now_s: float) -> Load:
        assert digest not in self.by_digest, "loaded twice"
        load = self.by_digest[digest] = Load(now_s, now_s)
        self.queued[digest] = None
        return load

    def on_pull(self, digest: str, job: PullJob, now_s: float) -> None:
        load = self.by_digest[digest]
        assert load.state is LoadState.QUEUED
        since_s = self.store_wait_since_s(digest)
        load.store_wait_since_s = now_s if since_s is None else since_s
        load.waited_s = now_s - load.started_s
        load.state, load.job = LoadState.PULLING, job
        job.last_progress_s = now_s
        del self.queued[digest]
        self.traces.on_pull(digest, job, now_s)

    def wait_for_room(self, digest: str, state: LoadState, now_s: float) -> None:
        self.by_digest[digest].wait_for_room(state, now_s)
        self.queued.pop(digest, None)
        if state is LoadState.NEEDS_DEVICE_ROOM:
            self.traces.on_pulled(digest, now_s)
        self.traces.on_wait(digest, now_s)
        self.short[state][digest] = None

    def on_pull_room(self, digest: str, now_s: float) -> None:
        self.by_digest[digest].on_pull_room(now_s)
        del self.short[LoadState.NEEDS_PULL_ROOM][digest]
        self.traces.on_pull_room(digest, now_s)

    def on_device_room(self, digest: str, now_s: float) -> Load:
        """Ends the load, which only a copy is left of, and returns it."""
        load = self.by_digest[digest]
        assert load.room_wait_since_s is not None
        load.waited_s += now_s - load.room_wait_since_s
        self._forget(digest)
        self.traces.on_copy(digest, now_s)
        return load

    def end(self, digest: str, *, is_resident: bool = False) -> None:
        self._forget(digest)
        if digest in self.traces:
            self.traces.end(digest, time.monotonic(), is_resident=is_resident)

    def _forget(self, digest: str) -> None:
        load = self.by_digest.pop(digest)
        if load.header is not None:
            self.traces.note(digest, bytes=load.header.total_bytes)
        self.queued.pop(digest, None)
        self.short[load.state].pop(digest, None)
        self._without_waiter.discard(digest)

    def park(self, now_s: float) -> None:
        """Frees the pull threads of loads that wait for memory to pull to."""
        for digest in self.short[LoadState.NEEDS_PULL_ROOM]:
            self._short_s = now_s
            job = self.by_digest[digest].job
            assert job is not None
            job.park()

    def keep_without_waiter(self, digest: str) -> None:
        """Lets a load proceed although nobody waits for it."""
        self._without_waiter.add(digest)

    # Counts.

    @property
    def num_pulling(self) -> int:
        """Pulls that need a thread: all but the ones that are queued or wait for memory."""
        return len(self.by_digest) - len(self.queued) - sum(map(len, self.short.values()))

    @property
    def num_by_state(self) -> dict[LoadState, int]:
        """Loads in each state; loads that are being copied have ended."""
        counts = {state: len(self.short[state]) for state in LoadState}
        return counts | {
            LoadState.QUEUED: len(self.queued),
            LoadState.PULLING: self.num_pulling,
        }

    @property
    def num_jobs(self) -> int:
        """Pulls whose threads may still write."""
        return sum(load.job is not None for load in self.by_digest.values())

    def num_to_start(self, num_workers: int) -> int:
        """Returns how many pulls may start, with so many threads."""
        return min(max(0, num_workers - self.num_pulling), len(self.queued))

    def num_short(self) -> dict[LoadState, int]:
        """Returns how many loads need room, by state."""
        return {state: len(digests) for state, digests in self.short.items() if digests}

    # Questions about one load.

    def trace(self, digest: str, parent: SpanContext, now_s: float) -> SpanContext | None:
        """See `Residency.trace_load`."""
        if digest in self.traces:
            return self.traces.link(digest, parent)
        load = self.by_digest.get(digest)
        if load is None:
            return None
        self.traces.start(digest, parent, now_s)
        if load.job is not None:
            self.traces.on_pull(digest, load.job, now_s)
        if load.state is not LoadState.PULLING:
            self.traces.on_wait(digest, now_s)
        return None

    def store_wait_since_s(self, digest: str) -> float | None:
        """Returns when the wait for the store began; None while it does not wait for the store.
        While others wait for memory to pull to, so do queued loads."""
        load = self.by_digest.get(digest)
        if load is None or load.needs_room:
            return None
        if load.state is LoadState.PULLING:
            return load.store_wait_since_s
        is_short = bool(self.short[LoadState.NEEDS_PULL_ROOM])
        return None if is_short else max(load.store_wait_since_s, self._short_s)

    def last_progress_s(self, digest: str) -> float | None:
        """Returns when bytes last arrived, or the load began; None while it does not wait for the
        store."""
        load = self.by_digest.get(digest)
        if load is None or load.state is not LoadState.PULLING or load.job is None:
            return self.store_wait_since_s(digest)
        return load.job.last_progress_s

    def needs_room(self, digest: str) -> bool:
        """Returns whether a load is there that only memory keeps from proceeding."""
        load = self.by_digest.get(digest)
        return load is not None and load.needs_room and not load.is_cancelled

    # Iteration.

    def in_arrival_order(self) -> Iterator[tuple[str, bool]]:
        """Iterates over the digests that need room or are queued, with False for not aged; reaches
        loads that no request waits for."""
        for digest in [*chain.from_iterable(self.short.values()), *self.queued]:
            yield digest, False

    def orphans(self, waiters: Collection[str]) -> list[str]:
        """Returns the loads that nobody waits for and nobody has cancelled."""
        return [
            digest
            for digest in self._without_waiter
            if digest not in waiters and not self.by_digest[digest].is_cancelled
        ]

    def check_integrity(self, waiters: Collection[str]) -> None:
        """Asserts that the indices agree with the loads, and that each load has a reason."""
        for digest, load in self.by_digest.items():
            assert (load.room_wait_since_s is not None) == load.needs_room
            assert (digest in self.short[load.state]) == load.needs_room
            assert (digest in self.queued) == (load.state is LoadState.QUEUED)
            assert digest in waiters or load.is_cancelled or digest in self._without_waiter
        assert sum(map(len, self.short.values())) == sum(
            load.needs_room for load in self.by_digest.values()
        )
        assert self._without_waiter <= set(self.by_digest)
