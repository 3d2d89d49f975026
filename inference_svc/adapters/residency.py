"""From a digest to a row of the table: who waits, what is on its way, what takes effect when.

Owned by the engine's thread. Nothing here blocks or touches a tensor: pulls run in the puller's
threads and report by PullEvents; changes to the arena are collected and ride in the next batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from inference_svc.adapters.arena import HostCopy, ResidencyChange, TableClear, TableWrite
from inference_svc.adapters.host_tier import HostTier
from inference_svc.adapters.puller import (
    ImageSink,
    PullDone,
    Puller,
    PullEvent,
    PullFailed,
    PullJob,
    PullOpened,
)
from inference_svc.adapters.slots import Resident, Slots
from inference_svc.adapters.store import ImageHeader
from inference_svc.errors import AdapterNotFound, AdapterUnusable, InferenceError


@dataclass(eq=False, slots=True)
class _Load:
    """A digest on its way: pulled by `job`, or (job None) waiting for its layout or device room.

    `since_s` is when it last began to wait for the store rather than for room.
    """

    since_s: float
    started_s: float
    job: PullJob | None = None
    opened: ImageHeader | None = None
    waits_for_room: bool = False


@dataclass
class ResidencyCounters:
    """Monotonic counts: requests that found their adapter on the device, in the host tier, or
    nowhere; pulls by outcome."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    pulls_done: int = 0
    pulls_failed: int = 0
    pulled_bytes: int = 0
    load_seconds: float = 0.0


@dataclass
class Residency:
    """`device` accounts for the arena. Without a `host` tier (CPU) pulls write into the arena.

    `pulled_into` is the memory that pulls write to: the host tier's or the arena's.
    `ahead_of(digest)` names the digests that requests queued before its first waiter want: what
    must not be evicted for its sake.
    """

    device: Slots
    host: HostTier | None
    pulled_into: memoryview
    puller: Puller
    max_rank: int
    ahead_of: Callable[[str], Collection[str]] = lambda digest: ()
    layout_id: str = ""
    counters: ResidencyCounters = field(default_factory=ResidencyCounters)
    _waiters: Counter[str] = field(default_factory=Counter)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _changes: list[ResidencyChange] = field(default_factory=list)
    _copying: list[str] = field(default_factory=list)
    _failures: list[tuple[str, InferenceError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device.on_evict = lambda resident: self._changes.append(TableClear(resident.slot))

    # --- what requests ask for ------------------------------------------------------------------

    def want(self, digest: str, now_s: float, count: bool = True) -> None:
        """One more waits for this adapter; starts its load if need be."""
        self._waiters[digest] += 1
        resident = self.device.get(digest)
        if count:
            self._count(digest, resident)
        if resident is None:
            self._begin(digest, now_s)

    def unwant(self, digest: str) -> None:
        """One waits no more; a load that nobody waits for is abandoned."""
        self._waited(digest)
        load = self._loads.get(digest)
        if load is not None and not self._waiters[digest]:
            if load.job is None:
                del self._loads[digest]
            else:
                load.job.cancel()

    def is_ready(self, digest: str, now_s: float) -> bool:
        """Whether `acquire` may be called; starts the load again if it was evicted since."""
        resident = self.device.get(digest)
        if resident is None:
            self._begin(digest, now_s)
        return self.can_run(digest)

    def can_run(self, digest: str) -> bool:
        """`is_ready`, without starting anything."""
        resident = self.device.get(digest)
        return resident is not None and resident.ready and not resident.draining

    def acquire(self, digest: str) -> int:
        """The slot of a ready adapter, held until `release`, for one that waited."""
        resident = self.device.acquire(digest, time.time())
        self._waited(digest)
        return resident.slot

    def release(self, digest: str) -> None:
        """Gives back what `acquire` held; a draining adapter is freed with its last user."""
        resident = self.device.release(digest)
        if resident.draining and resident.users == 0:
            self._drop(digest)

    def waits_for_room(self, digest: str) -> bool:
        """Whether only memory, held by what runs or is pinned, keeps it from being loaded."""
        load = self._loads.get(digest)
        return load is not None and load.waits_for_room

    def waiting_on_store_since_s(self, digest: str) -> float | None:
        """When the current wait for the store began; None while it waits for nothing of it."""
        load = self._loads.get(digest)
        return None if load is None or load.waits_for_room else load.since_s

    # --- what operators ask for -----------------------------------------------------------------

    def unload(self, digest: str) -> int:
        """Drains and frees; returns the bytes that this frees, maybe later (`is_draining`)."""
        resident = self.device.get(digest)
        hosted = None if self.host is None else self.host.slots.get(digest)
        if resident is None and hosted is None:
            raise AdapterNotFound(f"adapter {digest} is not resident", subject="ref")
        if any(r is not None and r.pinned for r in (resident, hosted)):
            raise AdapterUnusable(f"adapter {digest} is pinned; unpin it first", subject="ref")
        if resident is not None and not resident.ready:
            raise AdapterUnusable(f"adapter {digest} is still loading", subject="ref")
        freed = sum(r.num_bytes for r in (resident, hosted) if r is not None)
        if resident is None or resident.users == 0:
            self._drop(digest)
        else:
            resident.draining = True
        return freed

    def is_draining(self, digest: str) -> bool:
        resident = self.device.get(digest)
        return resident is not None and resident.draining

    # --- the turn of the engine -----------------------------------------------------------------

    def set_layout(self, layout_id: str, now_s: float) -> None:
        """Pulls may begin; what waited for this begins now."""
        self.layout_id = layout_id
        for digest, load in self._loads.items():
            if load.job is None and not load.waits_for_room:
                load.job = self.puller.start(digest, layout_id)
                load.since_s = now_s

    def on_pull_event(self, event: PullEvent, now_s: float) -> None:
        load = self._loads[event.job.digest]
        assert load.job is event.job
        if isinstance(event, PullOpened):
            self._on_opened(event, load)
        elif isinstance(event, PullDone):
            self._on_done(event, load, now_s)
        else:
            self._on_failed(event, now_s)

    def advance(self, now_s: float) -> None:
        """Gives room to what waits for it, in the order of asking, as far as room goes.

        Strictly in order within each memory, so that a small image never starves a large one.
        """
        full: set[bool] = set()
        for digest, load in list(self._loads.items()):
            into_device = load.job is None
            if not load.waits_for_room or into_device in full:
                continue
            if load.job is not None and load.job.is_cancelled:
                continue
            if not self._give_room(digest, load, now_s):
                full.add(into_device)

    def take_changes(self) -> tuple[ResidencyChange, ...]:
        """What takes effect with the next batch."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def take_failures(self) -> list[tuple[str, InferenceError]]:
        """Digests that cannot be loaded, each once: their waiters are to be ended."""
        failures, self._failures = self._failures, []
        return failures

    def settled(self) -> None:
        """The batch with the changes taken before has completed: copies are done."""
        for digest in self._copying:
            assert self.host is not None
            self.host.slots.release(digest)
        self._copying.clear()

    @property
    def num_loading(self) -> int:
        """Pulls whose threads may still write."""
        return sum(load.job is not None for load in self._loads.values())

    def cancel_all(self) -> None:
        for load in self._loads.values():
            if load.job is not None:
                load.job.cancel()

    def check_integrity(self) -> None:
        """Asserts that memory, waiters and loads agree."""
        self.device.check_integrity()
        memories = [self.device]
        if self.host is not None:
            self.host.slots.check_integrity()
            memories.append(self.host.slots)
        for slots in memories:
            for resident in slots.residents():
                assert resident.ready or resident.digest in self._loads, "a half-loaded image"
        assert all(count > 0 for count in self._waiters.values())

    # --- within -----------------------------------------------------------------------------------

    @property
    def _pull_slots(self) -> Slots:
        return self.device if self.host is None else self.host.slots

    def _waited(self, digest: str) -> None:
        assert self._waiters[digest] > 0
        self._waiters[digest] -= 1
        if not self._waiters[digest]:
            del self._waiters[digest]

    def _count(self, digest: str, resident: Resident | None) -> None:
        if resident is not None and resident.ready:
            self.counters.device_hits += 1
        elif self._in_host(digest) is not None:
            self.counters.host_hits += 1
        else:
            self.counters.misses += 1

    def _in_host(self, digest: str) -> Resident | None:
        hosted = None if self.host is None else self.host.slots.get(digest)
        return hosted if hosted is not None and hosted.ready else None

    def _begin(self, digest: str, now_s: float) -> None:
        if digest in self._loads:
            return
        load = self._loads[digest] = _Load(now_s, now_s)
        if self._in_host(digest) is not None:
            load.waits_for_room = True
        elif self.layout_id:
            load.job = self.puller.start(digest, self.layout_id)

    def _on_opened(self, event: PullOpened, load: _Load) -> None:
        digest = event.job.digest
        if digest in self._pull_slots:
            self._pull_slots.remove(digest)
        load.opened = event.header
        reason = self._inadmissible(event.header)
        if reason is None:
            load.waits_for_room = True
        else:
            self._failures.append((digest, AdapterUnusable(f"adapter {digest} has {reason}")))
            event.job.cancel()

    def _inadmissible(self, header: ImageHeader) -> str | None:
        rank = max(segment.rank for segment in header.segments)
        if rank > self.max_rank:
            return f"rank {rank}, above max_lora_rank {self.max_rank}"
        needed = header.total_bytes
        if not (self._pull_slots.admits(needed) and self.device.admits(needed)):
            return f"{needed} bytes, more than the memory for adapters can give"
        return None

    def _give_room(self, digest: str, load: _Load, now_s: float) -> bool:
        if load.job is None:
            return self._give_device_room(digest, load)
        assert load.opened is not None
        resident = self._pull_slots.reserve(load.opened, self.ahead_of(digest))
        if resident is None:
            return False
        load.waits_for_room = False
        load.since_s = now_s
        load.job.grant(ImageSink(self.pulled_into, resident.extents))
        return True

    def _give_device_room(self, digest: str, load: _Load) -> bool:
        """Moves a host image into the arena; the copy rides in the next batch."""
        assert self.host is not None
        hosted = self.host.slots.get(digest)
        assert hosted is not None
        resident = self.device.reserve(hosted.header, self.ahead_of(digest))
        if resident is None:
            return False
        self.host.slots.acquire(digest, time.time())
        self._copying.append(digest)
        self._changes.append(HostCopy(hosted, resident))
        resident.ready = True
        resident.load_seconds = hosted.load_seconds
        del self._loads[digest]
        return True

    def _on_done(self, event: PullDone, load: _Load, now_s: float) -> None:
        digest = event.job.digest
        resident = self._pull_slots.get(digest)
        assert resident is not None
        resident.ready = True
        resident.load_seconds = now_s - load.started_s
        resident.last_used_time_s = time.time()
        self.counters.pulls_done += 1
        self.counters.pulled_bytes += resident.header.total_bytes
        self.counters.load_seconds += resident.load_seconds
        del self._loads[digest]
        if self.host is None:
            self._changes.append(TableWrite(resident))
        elif self._waiters[digest]:
            self._begin(digest, now_s)

    def _on_failed(self, event: PullFailed, now_s: float) -> None:
        digest = event.job.digest
        if digest in self._pull_slots:
            self._pull_slots.remove(digest)
        del self._loads[digest]
        if event.error is not None:
            self.counters.pulls_failed += 1
            self._failures.append((digest, event.error))
        elif self._waiters[digest]:
            self._begin(digest, now_s)  # cancelled, and wanted again before it had ended

    def _drop(self, digest: str) -> None:
        if digest in self.device:
            self._changes.append(TableClear(self.device.remove(digest).slot))
        if self.host is not None and digest in self.host.slots:
            self.host.slots.remove(digest)
