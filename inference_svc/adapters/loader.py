"""Brings adapters in: from the store into the host tier or the arena, and to a row of the table.

Owned by the engine's thread. Nothing here blocks or touches a tensor: pulls run in the puller's
threads and report by PullEvents; changes to the arena are collected and ride in the next batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from inference_svc.adapters.changes import (
    HostCopy,
    PendingChanges,
    ResidencyChange,
    TableClear,
    TableWrite,
)
from inference_svc.adapters.copies import Copies
from inference_svc.adapters.drains import Drains
from inference_svc.adapters.host_tier import HostTier
from inference_svc.adapters.load_times import LoadTimes
from inference_svc.adapters.loads import Load, LoadCounters, Loads, LoadState
from inference_svc.adapters.prefetch import Prefetch
from inference_svc.adapters.pull_job import (
    ImageSink,
    PullDone,
    PullEvent,
    PullFailed,
    PullJob,
    PullOpened,
    SilentSources,
)
from inference_svc.adapters.puller import Puller
from inference_svc.adapters.slots import EvictionReason, Resident, Slots, why_inadmissible
from inference_svc.errors import AdapterUnusable, InferenceError

log = logging.getLogger(__name__)


@dataclass
class Loader:
    """`device` accounts for the arena. Without a `host` tier (CPU) pulls write into the arena.

    `pulled_into` is the memory that pulls write to: the host tier's or the arena's. `stall_s` is
    how long a pull that nobody waits for any more may go without progress. Without `prefetch`
    nothing comes unasked.
    """

    device: Slots
    host: HostTier | None
    pulled_into: memoryview
    puller: Puller
    max_rank: int
    stall_s: float
    prefetch: Prefetch | None = None
    layout_id: str = ""
    counters: LoadCounters = field(default_factory=LoadCounters)
    times: LoadTimes = field(default_factory=LoadTimes)
    _waiters: Counter[str] = field(default_factory=Counter)
    _loads: Loads = field(default_factory=Loads)
    _changes: PendingChanges = field(default_factory=PendingChanges)
    _silent: SilentSources = field(default_factory=SilentSources)
    _news: list[str] = field(default_factory=list)
    _failures: list[tuple[str, InferenceError]] = field(default_factory=list)

    _has_new: bool = False
    _drains: Drains = field(init=False)
    _copying: Copies = field(init=False)

    def __post_init__(self) -> None:
        self._drains = Drains(self.device)
        self._copying = Copies(self.times)
        self.device.on_evict = self._on_evict
        if self.host is not None:
            self.host.slots.on_evict = self._on_host_evict

    def ensure(self, digest: str, now_s: float) -> None:
        """Starts the load of an adapter that is neither resident nor on its way."""
        if digest in self.device or digest in self._loads:
            return
        load = self._loads.begin(digest, now_s)
        if self._in_host(digest) is not None:
            self._wait_for_device_room(digest, load, now_s)
        else:
            self._has_new = True

    def set_layout(self, layout_id: str) -> None:
        """Pulls may begin."""
        self.layout_id = layout_id

    def on_pull_event(self, event: PullEvent, now_s: float) -> None:
        load = self._loads[event.job.digest]
        assert load.job is event.job
        if isinstance(event, PullOpened):
            self._on_opened(event, load, now_s)
            return
        self.counters.pulls_corrupt += event.job.progress.num_corrupt
        if isinstance(event, PullDone):
            self._on_done(event.job, load, now_s)
        else:
            self._on_failed(event, now_s)

    def advance(self, now_s: float, in_order: Callable[[], Iterable[tuple[str, bool]]]) -> None:
        """Gives room to what waits for it, as far as room goes; begins pulls, as many as there are
        threads; gives up pulls that nobody waits for and that stand still.

        `in_order` names the digests that requests wait for, in order of service, and whether the
        request is aged: room is given in this order, or small images would starve large ones. An
        aged one takes it from all that come after it; what is in use drains for it. Any other
        takes it only from what nobody waits for. Pulls begin in this order, too, and none behind
        as many as there are threads that wait for room: it would only wait behind them.
        """
        self._has_new = False
        self._give_up_orphans(now_s)
        self._after_drains(now_s)
        left, num_short = self._loads.num_short(), 0
        num_turns = self._loads.num_turns(self.puller.num_workers) if self.layout_id else 0
        ahead: set[str] = set()
        chosen = chain(in_order(), self._loads.unordered()) if left or num_turns else ()
        for digest, is_aged in chosen:
            load = self._loads.get(digest) if digest not in ahead else None
            if load is not None and load.state is LoadState.NEEDS_TURN and num_turns:
                num_turns -= 1
                self._pull(digest, load, now_s)
            elif load is not None and left.get(load.state):
                left[load.state] -= 1
                keep = ahead if is_aged else self._waiters
                why = EvictionReason.AGED if is_aged else EvictionReason.REQUEST
                if not load.is_cancelled and not self._give_room(digest, load, keep, now_s, why):
                    left[load.state] = 0
                    if is_aged and (self.host is None or load.state is LoadState.NEEDS_DEVICE_ROOM):
                        assert load.header is not None
                        self._news += self._drains.start(digest, load.header, ahead)
            ahead.add(digest)
            num_short += load is not None and load.state is LoadState.NEEDS_PULL_ROOM
            if num_short >= self.puller.num_workers:
                num_turns = 0
            if not num_turns and not any(left.values()):
                break
        self._loads.park(now_s)
        self._news += self._drains.end(lambda digest: not self._loads.is_short(digest))
        self._look_ahead(now_s)

    def next_expiry_s(self) -> float | None:
        """When a pull that nobody waits for would be given up, or one may be begun."""
        moments = [
            self._loads.last_progress_s(digest) for digest in self._loads.orphans(self._waiters)
        ]
        expiries = [moment + self.stall_s for moment in moments if moment is not None]
        if self._has_new:
            expiries.append(0.0)  # it came too late for the last `advance`
        if self._may_prefetch and self.prefetch is not None:
            expiries += filter(None, [self.prefetch.next_look_s()])
        return min(expiries, default=None)

    @property
    def is_copying(self) -> bool:
        return bool(self._copying)

    @property
    def num_loads(self) -> dict[LoadState, int]:
        """Adapters on their way by state; those that are being copied have left it."""
        return self._loads.num_by_state

    def copied(self, digests: Iterable[str], now_s: float) -> None:
        """These lie in the arena, whole: they become visible with the next batch."""
        for digest in digests:
            assert self.host is not None
            self.host.slots.release(digest)
            copy = self._copying.end(digest, now_s)
            self._changes.append(TableWrite(copy.resident))
            self._arrive(copy.resident, copy.host.load_seconds)

    def take_changes(self) -> tuple[ResidencyChange, ...]:
        """What takes effect with the next batch."""
        return self._changes.take(None if self.host is None else self.host.step_copy_bytes)

    def take_news(self) -> list[str]:
        """Adapters of which `may_start` may have changed since the last call."""
        news, self._news = self._news, []
        return news

    def take_failures(self) -> list[tuple[str, InferenceError]]:
        """Digests that cannot be loaded, each once: their waiters are to be ended."""
        failures, self._failures = self._failures, []
        return failures

    # What nobody waits for yet.

    @property
    def _may_prefetch(self) -> bool:
        """Only while nothing is on its way that requests wait for."""
        return bool(self.prefetch is not None and self.layout_id and not self._loads.by_digest)

    def _look_ahead(self, now_s: float) -> None:
        if self.prefetch is None or not self._may_prefetch:
            return
        may_leave = partial(self._pull_slots.may_leave, self._waiters)
        digest = self.prefetch.choose(now_s, self._is_here, may_leave)
        if digest is not None:
            load = self._loads.begin(digest, now_s)
            self._loads.keep_unwanted(digest)
            self._pull(digest, load, now_s)

    def _is_here(self, digest: str) -> bool:
        return digest in self._pull_slots or digest in self.device

    def _give_prefetch_room(self, digest: str, load: Load, now_s: float) -> None:
        """Free room, or that of what is less popular and not waited for; else not at all."""
        assert self.prefetch is not None
        assert load.job is not None
        assert load.header is not None
        others = {resident.digest for resident in self._pull_slots.residents()}
        keep = self.prefetch.hotter_than(digest, others, now_s) | self._waiters.keys()
        if self._give_room(digest, load, keep, now_s, EvictionReason.PREFETCH):
            self.prefetch.opened(load.header.total_bytes, now_s)
        else:
            self.puller.cancel(load.job)

    def _prefetched(self, resident: Resident, now_s: float) -> None:
        """It lies where pulls write to. From a host tier it goes on where room is free."""
        assert self.prefetch is not None
        self.prefetch.arrived(now_s)
        if self.host is None:
            return
        others = {other.digest for other in self.device.residents()}
        on_device = self.device.reserve(resident.header, others)
        if on_device is not None:
            self.host.slots.acquire(resident.digest, time.time())
            self._copy(resident, on_device, now_s, None)

    # Within.

    @property
    def _pull_slots(self) -> Slots:
        return self.device if self.host is None else self.host.slots

    def _in_host(self, digest: str) -> Resident | None:
        hosted = None if self.host is None else self.host.slots.get(digest)
        return hosted if hosted is not None and hosted.ready else None

    def _on_evict(self, resident: Resident) -> None:
        log.debug("evicted", extra={"digest": resident.digest})
        self.times.left_device(resident)
        self._changes.append(TableClear(resident.slot))
        self._news.append(resident.digest)
        if self.host is None:
            self._left_pull_slots(resident)

    def _on_host_evict(self, resident: Resident) -> None:
        self.times.left_host(resident)
        self._left_pull_slots(resident)

    def _left_pull_slots(self, resident: Resident) -> None:
        """An image has left the memory that pulls write to."""
        if self.prefetch is not None:
            self.prefetch.left(resident.digest)

    def _is_prefetching(self, digest: str) -> bool:
        return self.prefetch is not None and self.prefetch.current == digest

    def _pull(self, digest: str, load: Load, now_s: float) -> None:
        job = PullJob(digest, self.layout_id, self._silent.of(digest))
        self._loads.pull(digest, job, now_s)
        self.puller.start(job)

    def _wait_for_device_room(self, digest: str, load: Load, now_s: float) -> None:
        """The host image is held until it is copied or the load abandoned."""
        assert self.host is not None
        load.header = self.host.slots.acquire(digest, time.time()).header
        load.job = None
        self._loads.wait_for_room(digest, LoadState.NEEDS_DEVICE_ROOM, now_s)

    def _abandon(self, digest: str, load: Load) -> None:
        if load.job is not None:
            self._silent.given_up(load.job, self.stall_s)
            self.puller.cancel(load.job)
            return
        self._loads.end(digest)
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            assert self.host is not None
            self.host.slots.release(digest)

    def _give_up_orphans(self, now_s: float) -> None:
        for digest in self._loads.orphans(self._waiters):
            since_s = self._loads.last_progress_s(digest)
            if since_s is not None and now_s >= since_s + self.stall_s:
                self._abandon(digest, self._loads[digest])

    def _on_opened(self, event: PullOpened, load: Load, now_s: float) -> None:
        digest = event.job.digest
        if digest in self._pull_slots:
            self._pull_slots.remove(digest)
        load.header = event.header
        self._loads.wait_for_room(digest, LoadState.NEEDS_PULL_ROOM, now_s)
        reason = why_inadmissible(event.header, self.max_rank, (self._pull_slots, self.device))
        if reason is not None:
            error = AdapterUnusable(f"adapter {digest} has {reason}", subject="adapter")
            self._failures.append((digest, error))
            self.puller.cancel(event.job)
        elif self._is_prefetching(digest):
            self._give_prefetch_room(digest, load, now_s)

    def _give_room(
        self, digest: str, load: Load, keep: Collection[str], now_s: float, why: EvictionReason
    ) -> bool:
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            return self._give_device_room(digest, keep, now_s, why)
        assert load.header is not None
        assert load.job is not None
        resident = self._pull_slots.reserve(load.header, keep, self._waiters, why)
        if resident is None:
            return False
        self._loads.got_pull_room(digest, now_s)
        load.job.last_progress_s = now_s
        if load.job.grant(ImageSink(self.pulled_into, resident.extents)):
            self.puller.start(load.job)
        return True

    def _after_drains(self, now_s: float) -> None:
        """What drained for a digest is its room, whatever came before it meanwhile, or drains no
        more: else all would wait for each other."""
        if not self._drains:
            return
        drained = self._drains.drained(self._waiters)
        for digest, keep in drained:
            if self._loads.is_short(digest):
                self._give_room(digest, self._loads[digest], keep, now_s, EvictionReason.AGED)
        over = {digest for digest, _ in drained}
        self._news += self._drains.end(lambda d: d in over or not self._loads.is_short(d))

    def _give_device_room(
        self, digest: str, keep: Collection[str], now_s: float, why: EvictionReason
    ) -> bool:
        """Moves a host image into the arena; the copy rides in the next batch that has room."""
        hosted = self._in_host(digest)
        assert hosted is not None, "the load holds it"
        resident = self.device.reserve(hosted.header, keep, self._waiters, why)
        if resident is None:
            return False
        load = self._loads.got_device_room(digest, now_s)
        self.times.wait.observe(load.waited_s)
        self._copy(hosted, resident, now_s, load.started_s)
        return True

    def _copy(self, host: Resident, room: Resident, now_s: float, wanted_s: float | None) -> None:
        """The host image is held until `copied`."""
        change = HostCopy(host, room)
        self._copying.begin(change, now_s, wanted_s)
        self._changes.append(change)

    def _arrive(self, resident: Resident, load_seconds: float) -> None:
        resident.ready = True
        resident.load_seconds = load_seconds
        resident.last_used_time_s = time.time()
        self._news.append(resident.digest)

    def _on_done(self, job: PullJob, load: Load, now_s: float) -> None:
        resident = self._pull_slots.get(job.digest)
        assert resident is not None
        load_seconds = now_s - load.started_s
        self.counters.pulls_done += 1
        self.counters.pulled_bytes += resident.header.total_bytes
        self.times.pull.observe(load_seconds - load.waited_s)
        if self.prefetch is not None:
            self.prefetch.budget.measured(resident.num_bytes, now_s - load.granted_s)
        if self.host is None:
            self._changes.append(TableWrite(resident))
            self._arrive(resident, load_seconds)
            if not self._is_prefetching(job.digest):
                self.times.loaded(load_seconds, load.waited_s)
        else:
            resident.ready, resident.load_seconds = True, load_seconds
        if self.host is not None and self._waiters[job.digest]:
            self._wait_for_device_room(job.digest, load, now_s)
            return
        self._loads.end(job.digest)
        if self._is_prefetching(job.digest):
            self._prefetched(resident, now_s)

    def _on_failed(self, event: PullFailed, now_s: float) -> None:
        digest = event.job.digest
        if digest in self._pull_slots:
            self._pull_slots.remove(digest)
        self._loads.end(digest)
        if self.prefetch is not None and event.error is not None:
            self.prefetch.forget(digest)
        if self.prefetch is not None and self._is_prefetching(digest):
            self.prefetch.refused(now_s)
        if event.error is not None:
            facts = {"digest": digest, "reason": event.error.reason, "why": event.error.message}
            log.warning("adapter cannot be loaded", extra=facts)
            self.counters.pulls_failed += 1
            self._failures.append((digest, event.error))
        elif self._waiters[digest]:
            self.ensure(digest, now_s)  # cancelled, and wanted again before it had ended
