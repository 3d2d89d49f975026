"""Adapters on their way: each in one state, and what moves it to the next."""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from inference_svc.adapters.image_source import ImageHeader
from inference_svc.adapters.load_metrics import LoadSource
from inference_svc.adapters.load_traces import LoadTraces
from inference_svc.adapters.pull import PullJob
from inference_svc.spans import SpanContext


class LoadState(enum.Enum):
    """NEEDS_TURN -> PULLING <-> NEEDS_PULL_ROOM -> done, or with a host tier NEEDS_DEVICE_ROOM.

    NEEDS_TURN: others are pulled first, or the store does not know our layout yet. PULLING: the
    store is at work.
    NEEDS_PULL_ROOM: the size is known, and the memory that pulls write to is full.
    NEEDS_DEVICE_ROOM: the image lies in the host tier, held there, and the arena is full.
    """

    NEEDS_TURN = "needs_turn"
    PULLING = "pulling"
    NEEDS_PULL_ROOM = "needs_pull_room"
    NEEDS_DEVICE_ROOM = "needs_device_room"


@dataclass(eq=False, slots=True)
class Load:
    """One digest on its way. Times are seconds on the monotonic clock.

    `store_wait_since_s` is when it began to wait for the store, moved forward by the time that it
    waited for room instead. `room_wait_since_s` is set while it waits for room. `header` is known
    once the pull has opened; `granted_s` is when that got room to write to, None before.
    `waited_s` is how long it has waited for its turn and for room so far.
    """

    started_s: float
    store_wait_since_s: float
    state: LoadState = LoadState.NEEDS_TURN
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
        """Of a load that needs no more than room on the device."""
        return LoadSource.HOST if self.granted_s is None else LoadSource.STORE

    @property
    def is_cancelled(self) -> bool:
        return self.job is not None and self.job.is_cancelled

    def wait_for_room(self, state: LoadState, now_s: float) -> None:
        self.state, self.room_wait_since_s = state, now_s
        assert self.needs_room

    def got_pull_room(self, now_s: float) -> None:
        assert self.state is LoadState.NEEDS_PULL_ROOM
        assert self.room_wait_since_s is not None
        room_wait_s = now_s - self.room_wait_since_s
        self.store_wait_since_s += room_wait_s
        self.waited_s += room_wait_s
        self.state, self.room_wait_since_s, self.granted_s = LoadState.PULLING, None, now_s


@dataclass
class Loads:
    """All loads by digest; those that need their turn or room, first come first, and those that
    lost their waiters, at hand."""

    by_digest: dict[str, Load] = field(default_factory=dict)
    queued: dict[str, None] = field(default_factory=dict)
    short: dict[LoadState, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    traces: LoadTraces = field(default_factory=LoadTraces)
    _short_s: float = -math.inf
    """When a pull last waited for room."""
    _unwanted: set[str] = field(default_factory=set)

    def __contains__(self, digest: str) -> bool:
        return digest in self.by_digest

    def __getitem__(self, digest: str) -> Load:
        return self.by_digest[digest]

    def get(self, digest: str) -> Load | None:
        return self.by_digest.get(digest)

    def begin(self, digest: str, now_s: float) -> Load:
        assert digest not in self.by_digest
        load = self.by_digest[digest] = Load(now_s, now_s)
        self.queued[digest] = None
        return load

    def pull(self, digest: str, job: PullJob, now_s: float) -> None:
        """Its turn has come."""
        load = self.by_digest[digest]
        since_s = self.store_wait_since_s(digest)
        load.store_wait_since_s = now_s if since_s is None else since_s
        load.waited_s = now_s - load.started_s
        load.state, load.job = LoadState.PULLING, job
        del self.queued[digest]
        self.traces.pulls(digest, job, now_s)

    @property
    def num_pulling(self) -> int:
        """Pulls that need a thread: all but those that wait for their turn or for room."""
        return len(self.by_digest) - len(self.queued) - sum(map(len, self.short.values()))

    @property
    def num_by_state(self) -> dict[LoadState, int]:
        """How many there are in each state."""
        counts = {state: len(self.short[state]) for state in LoadState}
        return counts | {
            LoadState.NEEDS_TURN: len(self.queued),
            LoadState.PULLING: self.num_pulling,
        }

    def num_turns(self, num_workers: int) -> int:
        """How many pulls may begin, of so many at a time."""
        return min(max(0, num_workers - self.num_pulling), len(self.queued))

    def trace(self, digest: str, asker: SpanContext, now_s: float) -> SpanContext | None:
        """See Residency.trace_load."""
        if digest in self.traces:
            return self.traces.link(digest, asker)
        load = self.by_digest.get(digest)
        if load is None:
            return None
        self.traces.follow(digest, asker, now_s)
        if load.job is not None:
            self.traces.pulls(digest, load.job, now_s)
        if load.state is not LoadState.PULLING:
            self.traces.waits(digest, now_s)
        return None

    def end(self, digest: str, *, is_here: bool = False) -> None:
        """`is_here`: requests can run with it."""
        self._forget(digest)
        if digest in self.traces:
            self.traces.end(digest, time.monotonic(), is_here=is_here)

    def _forget(self, digest: str) -> None:
        load = self.by_digest.pop(digest)
        if load.header is not None:
            self.traces.note(digest, bytes=load.header.total_bytes)
        self.queued.pop(digest, None)
        self.short[load.state].pop(digest, None)
        self._unwanted.discard(digest)

    def wait_for_room(self, digest: str, state: LoadState, now_s: float) -> None:
        self.by_digest[digest].wait_for_room(state, now_s)
        self.queued.pop(digest, None)
        if state is LoadState.NEEDS_DEVICE_ROOM:
            self.traces.is_pulled(digest, now_s)
        self.traces.waits(digest, now_s)
        self.short[state][digest] = None

    def got_pull_room(self, digest: str, now_s: float) -> None:
        self.by_digest[digest].got_pull_room(now_s)
        del self.short[LoadState.NEEDS_PULL_ROOM][digest]
        self.traces.goes_on(digest, now_s)

    def got_device_room(self, digest: str, now_s: float) -> Load:
        """Here it ends: what is left is a copy."""
        load = self.by_digest[digest]
        assert load.room_wait_since_s is not None
        load.waited_s += now_s - load.room_wait_since_s
        self._forget(digest)
        self.traces.copies(digest, now_s)
        return load

    def park(self, now_s: float) -> None:
        """What waits for room to be pulled to keeps no thread."""
        for digest in self.short[LoadState.NEEDS_PULL_ROOM]:
            self._short_s = now_s
            job = self.by_digest[digest].job
            assert job is not None
            job.park()

    def store_wait_since_s(self, digest: str) -> float | None:
        """When the wait for the store began; None while it waits for nothing of the store. What
        needs its turn waits for memory, not for the store, while others wait for that."""
        load = self.by_digest.get(digest)
        if load is None or load.needs_room:
            return None
        if load.state is LoadState.PULLING:
            return load.store_wait_since_s
        is_short = bool(self.short[LoadState.NEEDS_PULL_ROOM])
        return None if is_short else max(load.store_wait_since_s, self._short_s)

    def last_progress_s(self, digest: str) -> float | None:
        """When bytes last arrived, or the load began; None while it does not wait on the store."""
        load = self.by_digest.get(digest)
        if load is None or load.state is not LoadState.PULLING or load.job is None:
            return self.store_wait_since_s(digest)
        return load.job.last_progress_s

    def is_short(self, digest: str) -> bool:
        """Whether nothing but room keeps it from going on."""
        load = self.by_digest.get(digest)
        return load is not None and load.needs_room and not load.is_cancelled

    def num_short(self) -> dict[LoadState, int]:
        """How many need room, by the kind of it."""
        return {state: len(digests) for state, digests in self.short.items() if digests}

    def unordered(self) -> Iterator[tuple[str, bool]]:
        """What needs room or its turn, none of it aged: for those that no request waits for."""
        for digest in [*chain.from_iterable(self.short.values()), *self.queued]:
            yield digest, False

    def keep_unwanted(self, digest: str) -> None:
        """It goes on although nobody waits for it."""
        self._unwanted.add(digest)

    def orphans(self, waiters: Collection[str]) -> list[str]:
        """Loads that nobody waits for and nobody has cancelled."""
        return [
            digest
            for digest in self._unwanted
            if digest not in waiters and not self.by_digest[digest].is_cancelled
        ]

    def check_integrity(self, waiters: Collection[str]) -> None:
        for digest, load in self.by_digest.items():
            assert (load.room_wait_since_s is not None) == load.needs_room
            assert (digest in self.short[load.state]) == load.needs_room
            assert (digest in self.queued) == (load.state is LoadState.NEEDS_TURN)
            assert digest in waiters or load.is_cancelled or digest in self._unwanted
        assert sum(map(len, self.short.values())) == sum(
            load.needs_room for load in self.by_digest.values()
        )
        assert self._unwanted <= set(self.by_digest)


@dataclass
class LoadCounters:
    """Monotonic counts: requests that found their adapter on the device, in the host tier, or
    nowhere; pulls by outcome, and those of which bytes failed their hash, whatever came of them."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    pulls_done: int = 0
    pulls_failed: int = 0
    pulls_corrupt: int = 0
    pulled_bytes: int = 0
