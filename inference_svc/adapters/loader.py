"""Brings adapters in: from the store into the host tier or the arena, and to a row of the table.

Owned by the engine's thread. Nothing here blocks or touches a tensor: pulls run in the puller's
threads and report by PullEvents; changes to the arena are collected and ride in the next batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from contract.images.header import ImageHeader
from inference_svc.adapters.load_metrics import LoadCounters, LoadTimes
from inference_svc.adapters.load_states import Load, Loads, LoadState
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import inadmissible_reason
from inference_svc.adapters.memory.placement import Placement
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.stages import parts_of
from inference_svc.adapters.memory.tiers import MemoryTiers
from inference_svc.adapters.prefetch import Prefetcher
from inference_svc.adapters.pulls.pull import (
    PullDone,
    PullEvent,
    PullFailed,
    PullFilled,
    PullJob,
    PullOpened,
    SilentSources,
)
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.core import AdapterKey, digests_of
from inference_svc.errors import TRY_LATER_SEE_LOG, AdapterUnusable
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)


Refusal = Callable[[ImageHeader], str | None]
"""Returns the contents of an image that this server does not apply, in words that follow "has";
None if it applies everything."""


def accept_all(header: ImageHeader) -> None:
    """Refuses no image."""


class Loader:
    """Moves `loads` from state to state.

    `waiters` counts the requests that wait for each digest. `stall_s` is how long a pull that
    nobody waits for may go without progress. No pull starts before `set_layout`.
    """

    def __init__(
        self,
        tiers: MemoryTiers,
        loads: Loads,
        placement: Placement,
        prefetcher: Prefetcher,
        puller: Puller,
        waiters: Counter[str],
        counters: LoadCounters,
        times: LoadTimes,
        *,
        max_rank: int,
        stall_s: float,
        refusal: Refusal,
    ) -> None:
        assert max_rank > 0
        self.tiers = tiers
        self.loads = loads
        self.placement = placement
        self.prefetcher = prefetcher
        self.puller = puller
        self.waiters = waiters
        self.counters = counters
        self.times = times
        self.max_rank = max_rank
        self.stall_s = stall_s
        self.refusal = refusal
        self._layout_id = ""
        self._silent = SilentSources()
        self._failures: list[tuple[str, ServiceError]] = []
        self._has_new = False
        self._num_pinnings = 0

    def set_layout(self, layout_id: str, others: tuple[str, ...] = ()) -> None:
        """Lets pulls start; the store knows our layout by this id, and those of the other ranks by
        `others`."""
        self._layout_id = layout_id
        if self.puller.others is not None:
            self.puller.others.set_layouts(others)

    def load(self, digest: str, now_s: float) -> None:
        """Begins the load of an adapter that is neither resident nor on its way."""
        if digest in self.tiers.device or digest in self.loads:
            return
        load = self.loads.begin(digest, now_s)
        if self.tiers.host_resident(digest) is not None:
            self._wait_for_device_room(digest, load, now_s)
        else:
            self._has_new = True

    def wait_reason(self, digest: str, now_s: float) -> str:
        """Returns why an adapter waits for the store, as a caller may know it, and how the caller
        can help."""
        if not self._layout_id:
            reason = "the adapter store has not answered since this server started"
            return f"{reason}; {TRY_LATER_SEE_LOG}"
        return self.loads[digest].wait_reason(now_s)

    def abandon(self, digest: str) -> None:
        """Ends a load that nobody waits for."""
        load = self.loads[digest]
        if load.job is not None:
            self._silent.record_abandoned(load.job, self.stall_s)
            self.puller.cancel(load.job)
            return
        self.loads.end(digest)
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            self.tiers.unpin_on_host(digest)

    def cancel_all(self) -> None:
        for load in self.loads.by_digest.values():
            if load.job is not None:
                self.puller.cancel(load.job)

    def pop_failures(self) -> list[tuple[str, ServiceError]]:
        """Returns the digests that could not be loaded since the last call, each once: their
        waiters are to be ended."""
        failures, self._failures = self._failures, []
        return failures

    def next_expiry_s(self) -> float | None:
        """Returns when `advance` is to be called again if nothing happens before: when a pull that
        nobody waits for will have stalled, or one may be started."""
        times = [self.loads.last_progress_s(digest) for digest in self.loads.orphans(self.waiters)]
        expiries = [last_s + self.stall_s for last_s in times if last_s is not None]
        if self._has_new or self._failures:
            expiries.append(0.0)  # it came too late for the last step
        if self._layout_id:
            expiries += filter(None, [self.prefetcher.next_check_s()])
        return min(expiries, default=None)

    # One step.

    def advance(self, now_s: float, in_order: Iterable[tuple[AdapterKey, bool]]) -> None:
        """Reserves memory for loads that need it, as much as there is; starts pulls, as many as
        there are threads; abandons stalled pulls that nobody waits for; prefetches.

        `in_order` iterates over the keys that requests wait for, in order of service, and
        whether the request is aged: memory is reserved in this order, or small images would starve
        large ones. For an aged one, images of all that are due after it are evicted or drained; for
        any other, only images that nobody waits for. Pulls start in this order, too, and none
        behind as many as there are threads that wait for memory: it would only wait behind them.
        """
        self._has_new = False
        self._abandon_stalled(now_s)
        self._refuse_excluded()
        self._on_evicted(self.placement.reserve_drained(now_s))
        left, num_short = self.loads.num_short(), 0
        num_to_start = self.loads.num_to_start(self.puller.num_workers) if self._layout_id else 0
        before: set[str] = set()
        due = self._due(in_order) if left or num_to_start else ()
        for digest, is_aged in due:
            load = self.loads.get(digest) if digest not in before else None
            if load is not None and load.state is LoadState.QUEUED and num_to_start:
                num_to_start -= 1
                self._start_pull(digest, now_s)
            elif load is not None and left.get(load.state):
                left[load.state] -= 1
                is_done = load.is_cancelled or self._reserve(digest, load, before, is_aged, now_s)
                if not is_done:
                    left[load.state] = 0
            before.add(digest)
            num_short += load is not None and load.state is LoadState.NEEDS_PULL_ROOM
            if num_short >= self.puller.num_workers:
                num_to_start = 0
            if not num_to_start and not any(left.values()):
                break
        self.loads.park(now_s)
        self.placement.end_drains()
        self._prefetch(now_s)

    def _due(self, in_order: Iterable[tuple[AdapterKey, bool]]) -> Iterator[tuple[str, bool]]:
        for key, is_aged in in_order:
            for digest in digests_of(key):
                yield digest, is_aged
        yield from self.loads.in_arrival_order()

    def _reserve(
        self, digest: str, load: Load, before: set[str], is_aged: bool, now_s: float
    ) -> bool:
        """Reserves memory for a load, or drains images for an aged one; returns whether there was
        memory. `before` are the digests that are due before it."""
        keep = before if is_aged else self.waiters
        reason = EvictionReason.AGED if is_aged else EvictionReason.REQUEST
        evicted = self.placement.reserve(digest, load, keep, now_s, reason)
        if evicted is not None:
            self._on_evicted(evicted)
            return True
        if is_aged:
            self.placement.drain(digest, load, before)
        return False

    def _on_evicted(self, evicted: list[Resident]) -> None:
        if evicted:
            self.prefetcher.on_evicted(resident.digest for resident in evicted)

    def _abandon_stalled(self, now_s: float) -> None:
        for digest in self.loads.orphans(self.waiters):
            since_s = self.loads.last_progress_s(digest)
            if since_s is not None and now_s >= since_s + self.stall_s:
                self.abandon(digest)

    def _refuse_excluded(self) -> None:
        """Refuses admitted loads that wait for memory and have no room beside images pinned since:
        they would wait for ever, and so would all loads due after them."""
        num_pinnings = self.tiers.device.pins.num_pinnings
        if num_pinnings == self._num_pinnings:
            return
        self._num_pinnings = num_pinnings
        for digest in [*chain.from_iterable(self.loads.short.values())]:
            load = self.loads[digest]
            assert load.header is not None
            reason = None if load.is_cancelled else self._inadmissible_reason(load.header)
            if reason is None:
                continue
            if self.waiters[digest]:
                self._refuse(digest, reason)
            else:
                self.abandon(digest)

    def _inadmissible_reason(self, header: ImageHeader) -> str | None:
        host = None if self.tiers.host is None else self.tiers.host.slots
        return inadmissible_reason(header, self.max_rank, self.tiers.device, host)

    def _refuse(self, digest: str, reason: str) -> None:
        """Ends its waiters with the next step, and with them its load."""
        error = AdapterUnusable(f"adapter {digest} has {reason}", subject="adapter")
        self._failures.append((digest, error))

    def _prefetch(self, now_s: float) -> None:
        digest = self.prefetcher.choose(now_s) if self._layout_id else None
        if digest is not None:
            self.loads.begin(digest, now_s)
            self.loads.keep_without_waiter(digest)
            self._start_pull(digest, now_s)

    def _start_pull(self, digest: str, now_s: float) -> None:
        job = PullJob(digest, self._layout_id, self._silent.avoided_for(digest))
        self.loads.on_pull(digest, job, now_s)
        self.puller.start(job)

    def _wait_for_device_room(self, digest: str, load: Load, now_s: float) -> None:
        """Pins the host image until it is copied or the load abandoned."""
        load.header = self.tiers.pin_on_host(digest).header
        load.job = None
        self.loads.wait_for_room(digest, LoadState.NEEDS_DEVICE_ROOM, now_s)

    # Events.

    def on_pull_event(self, event: PullEvent, now_s: float) -> None:
        if isinstance(event, PullFilled):
            self.tiers.end_filling(event.job.digest)
            return
        load = self.loads[event.job.digest]
        assert load.job is event.job
        if isinstance(event, PullOpened):
            self._on_opened(event, load, now_s)
            return
        self.counters.pulls_corrupt += event.job.progress.num_corrupt
        if isinstance(event, PullDone):
            self._on_done(event, load, now_s)
        else:
            self._on_failed(event, now_s)

    def _on_opened(self, event: PullOpened, load: Load, now_s: float) -> None:
        digest, pull_tier = event.job.digest, self.tiers.pull_tier
        if digest in pull_tier:
            pull_tier.remove(digest)
        load.header = event.header
        self.loads.wait_for_room(digest, LoadState.NEEDS_PULL_ROOM, now_s)
        reason = self.refusal(event.header) or self._inadmissible_reason(event.header)
        if reason is not None:
            self._refuse(digest, reason)
            self.puller.cancel(event.job)
        elif self.prefetcher.is_prefetching(digest) and not self.prefetcher.reserve(
            digest, load, now_s
        ):
            self.puller.cancel(event.job)

    def _on_done(self, event: PullDone, load: Load, now_s: float) -> None:
        digest = event.job.digest
        resident = self.tiers.pull_tier.get(digest)
        assert resident is not None
        assert load.granted_s is not None
        load_seconds = now_s - load.started_s
        self.counters.pulls_done += 1
        self.counters.pulled_bytes += parts_of(resident.header)[0].total_bytes
        self.times.pull.observe(load_seconds - load.waited_s)
        self.prefetcher.record_pull(resident.num_bytes, now_s - load.granted_s)
        is_prefetch = self.prefetcher.is_prefetching(digest)
        if self.tiers.host is None:
            self.tiers.publish(resident, load_seconds)
            if not is_prefetch:
                self.times.observe_pulled_load(load_seconds, load.waited_s)
        else:
            resident.ready, resident.load_seconds = True, load_seconds
            if event.registered is not None:
                self.tiers.begin_filling(digest, event.registered)
            if self.waiters[digest]:
                self._wait_for_device_room(digest, load, now_s)
                return
        self.loads.end(digest, is_resident=True)
        if is_prefetch:
            self.prefetcher.on_pulled(resident, now_s)

    def _on_failed(self, event: PullFailed, now_s: float) -> None:
        digest, error = event.job.digest, event.error
        if digest in self.tiers.pull_tier:
            self.tiers.pull_tier.remove(digest)
        self.loads.traces.note(digest, error)
        self.loads.end(digest)
        self.prefetcher.on_failed(digest, now_s, is_cancelled=error is None)
        if error is not None:
            facts = {"digest": digest, "reason": error.reason, "why": error.message}
            logger.warning("adapter cannot be loaded", extra=facts)
            self.counters.pulls_failed += 1
            self._failures.append((digest, error))
        elif self.waiters[digest]:
            self.load(digest, now_s)  # cancelled, and requested again before it ended

    def finish_dividing(self, digest: str, error: ServiceError | None) -> None:
        """Publishes an image whose magnitudes are divided; or fails its load, if they cannot be."""
        self.tiers.end_dividing(digest, is_sound=error is None)
        if error is not None:
            self.prefetcher.on_removed(digest)
            self._failures.append((digest, error))

    def finish_copies(self, digests: Iterable[str], now_s: float) -> None:
        """Publishes images whose copies into the arena are complete."""
        for digest in digests:
            copy = self.tiers.end_copy(digest)
            self.loads.traces.end(digest, now_s, is_resident=True)
            if copy.load is not None:
                self.times.copy.observe(now_s - copy.started_s)
                self.times.load[copy.load.source].observe(now_s - copy.load.started_s)
