"""Brings adapters in: from the store into the host tier or the arena, and to a row of the table.

Owned by the engine's thread. Nothing here blocks or touches a tensor: pulls run in the puller's
threads and report by PullEvents; changes to the arena are collected and ride in the next batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from inference_svc.adapters.ahead import Ahead
from inference_svc.adapters.changes import ResidencyChange
from inference_svc.adapters.host_tier import HostTier
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.loads import Load, LoadCounters, Loads, LoadState
from inference_svc.adapters.placement import Rooms
from inference_svc.adapters.prefetch import Prefetch
from inference_svc.adapters.pull import (
    PullDone,
    PullEvent,
    PullFailed,
    PullJob,
    PullOpened,
    SilentSources,
)
from inference_svc.adapters.puller import Puller
from inference_svc.adapters.slots import EvictionReason, Slots, why_inadmissible
from inference_svc.adapters.tiers import Memories
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
    _silent: SilentSources = field(default_factory=SilentSources)
    _failures: list[tuple[str, InferenceError]] = field(default_factory=list)
    _has_new: bool = False
    _memories: Memories = field(init=False)
    _rooms: Rooms = field(init=False)
    _ahead: Ahead = field(init=False)

    def __post_init__(self) -> None:
        loads, waiters = self._loads, self._waiters
        memories = Memories(self.device, self.host, self.times, loads.traces, self._left)
        rooms = Rooms(memories, loads, waiters, self.puller, self.pulled_into)
        self._memories, self._rooms = memories, rooms
        self._ahead = Ahead(self.prefetch, memories, loads, rooms, waiters)

    def ensure_loading(self, digest: str, now_s: float) -> None:
        """Starts the load of an adapter that is neither resident nor on its way."""
        if digest in self.device or digest in self._loads:
            return
        load = self._loads.begin(digest, now_s)
        if self._memories.in_host(digest) is not None:
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
        self._rooms.after_drains(now_s)
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
                if not load.is_cancelled and not self._rooms.give(digest, load, keep, now_s, why):
                    left[load.state] = 0
                    if is_aged:
                        self._rooms.drain(digest, load, ahead)
            ahead.add(digest)
            num_short += load is not None and load.state is LoadState.NEEDS_PULL_ROOM
            if num_short >= self.puller.num_workers:
                num_turns = 0
            if not num_turns and not any(left.values()):
                break
        self._loads.park(now_s)
        self._rooms.end_drains()
        self._look_ahead(now_s)

    def next_expiry_s(self) -> float | None:
        """When a pull that nobody waits for would be given up, or one may be begun."""
        moments = [
            self._loads.last_progress_s(digest) for digest in self._loads.orphans(self._waiters)
        ]
        expiries = [moment + self.stall_s for moment in moments if moment is not None]
        if self._has_new:
            expiries.append(0.0)  # it came too late for the last `advance`
        if self.layout_id:
            expiries += filter(None, [self._ahead.next_look_s()])
        return min(expiries, default=None)

    @property
    def is_copying(self) -> bool:
        return bool(self._memories.copying)

    @property
    def num_loads(self) -> dict[LoadState, int]:
        """Adapters on their way by state; those that are being copied have left it."""
        return self._loads.num_by_state

    def finish_copies(self, digests: Iterable[str], now_s: float) -> None:
        """These lie in the arena, whole: they become visible with the next batch."""
        self._memories.finish_copies(digests, now_s)

    def pop_changes(self) -> tuple[ResidencyChange, ...]:
        """What takes effect with the next batch."""
        return self._memories.pop_changes()

    def pop_ready(self) -> list[str]:
        """Adapters of which `is_schedulable` may have changed since the last call."""
        return self._memories.pop_ready()

    def pop_failures(self) -> list[tuple[str, InferenceError]]:
        """Digests that cannot be loaded, each once: their waiters are to be ended."""
        failures, self._failures = self._failures, []
        return failures

    # Within.

    def _look_ahead(self, now_s: float) -> None:
        digest = self._ahead.choose(now_s) if self.layout_id else None
        if digest is not None:
            load = self._loads.begin(digest, now_s)
            self._loads.keep_unwanted(digest)
            self._pull(digest, load, now_s)

    def _left(self, digest: str) -> None:
        self._ahead.left(digest)

    def _pull(self, digest: str, load: Load, now_s: float) -> None:
        job = PullJob(digest, self.layout_id, self._silent.of(digest))
        self._loads.pull(digest, job, now_s)
        self.puller.start(job)

    def _wait_for_device_room(self, digest: str, load: Load, now_s: float) -> None:
        """The host image is held until it is copied or the load abandoned."""
        load.header = self._memories.hold_in_host(digest).header
        load.job = None
        self._loads.wait_for_room(digest, LoadState.NEEDS_DEVICE_ROOM, now_s)

    def _abandon(self, digest: str, load: Load) -> None:
        if load.job is not None:
            self._silent.given_up(load.job, self.stall_s)
            self.puller.cancel(load.job)
            return
        self._loads.end(digest)
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            self._memories.release_in_host(digest)

    def _give_up_orphans(self, now_s: float) -> None:
        for digest in self._loads.orphans(self._waiters):
            since_s = self._loads.last_progress_s(digest)
            if since_s is not None and now_s >= since_s + self.stall_s:
                self._abandon(digest, self._loads[digest])

    def _on_opened(self, event: PullOpened, load: Load, now_s: float) -> None:
        digest, pulled = event.job.digest, self._memories.pulled
        if digest in pulled:
            pulled.remove(digest)
        load.header = event.header
        self._loads.wait_for_room(digest, LoadState.NEEDS_PULL_ROOM, now_s)
        reason = why_inadmissible(event.header, self.max_rank, (pulled, self.device))
        if reason is not None:
            error = AdapterUnusable(f"adapter {digest} has {reason}", subject="adapter")
            self._failures.append((digest, error))
            self.puller.cancel(event.job)
        elif self._ahead.is_bringing(digest) and not self._ahead.give_room(digest, load, now_s):
            self.puller.cancel(event.job)

    def _on_done(self, job: PullJob, load: Load, now_s: float) -> None:
        digest = job.digest
        resident = self._memories.pulled.get(digest)
        assert resident is not None
        assert load.granted_s is not None
        load_seconds = now_s - load.started_s
        self.counters.pulls_done += 1
        self.counters.pulled_bytes += resident.header.total_bytes
        self.times.pull.observe(load_seconds - load.waited_s)
        self._ahead.pulled(resident.num_bytes, now_s - load.granted_s)
        if self.host is None:
            self._memories.arrive(resident, load_seconds)
            if not self._ahead.is_bringing(digest):
                self.times.loaded(load_seconds, load.waited_s)
        else:
            resident.ready, resident.load_seconds = True, load_seconds
            if self._waiters[digest]:
                self._wait_for_device_room(digest, load, now_s)
                return
        self._loads.end(digest, is_here=True)
        if self._ahead.is_bringing(digest):
            self._ahead.arrived(resident, now_s)

    def _on_failed(self, event: PullFailed, now_s: float) -> None:
        digest, error = event.job.digest, event.error
        if digest in self._memories.pulled:
            self._memories.pulled.remove(digest)
        self._loads.traces.note(digest, error)
        self._loads.end(digest)
        self._ahead.failed(digest, now_s, is_cancelled=error is None)
        if error is not None:
            facts = {"digest": digest, "reason": error.reason, "why": error.message}
            log.warning("adapter cannot be loaded", extra=facts)
            self.counters.pulls_failed += 1
            self._failures.append((digest, error))
        elif self._waiters[digest]:
            self.ensure_loading(digest, now_s)  # cancelled, and wanted again before it had ended
