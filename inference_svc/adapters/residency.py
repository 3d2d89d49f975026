"""Tracks who waits for which adapter and who uses it, for requests and operators.

`build_residency` wires the parts: a `Loader` that moves `Loads`, the `MemoryTiers` that they end
in, the `Placement` that reserves memory there, and a `Prefetcher`. Each knows only the parts that
were made before it, and returns its changes for other parts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from inference_svc.adapters.load_metrics import LoadCounters, LoadTimes
from inference_svc.adapters.load_states import Loads, LoadState
from inference_svc.adapters.loader import Loader, Refusal, accept_all
from inference_svc.adapters.placement import Drains, Placement
from inference_svc.adapters.prefetch import Prefetcher, PrefetchPolicy
from inference_svc.adapters.pull import PullEvent
from inference_svc.adapters.pull_threads import Puller
from inference_svc.adapters.slots import Slots
from inference_svc.adapters.tiers import HostTier, MemoryTiers, ResidencyChange
from inference_svc.errors import AdapterNotFound, AdapterUnusable
from servicekit.errors import ServiceError
from servicekit.telemetry.spans import Span, SpanContext


class Residency:
    """Takes adapters from a digest to a slot and back.

    `waiters` counts the requests, and operators, that wait for each digest.
    """

    def __init__(
        self,
        tiers: MemoryTiers,
        loads: Loads,
        drains: Drains,
        prefetcher: Prefetcher,
        loader: Loader,
        waiters: Counter[str],
        counters: LoadCounters,
        times: LoadTimes,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = tiers
        self.device, self.host = tiers.device, tiers.host
        self.loads = loads
        self.drains = drains
        self.prefetcher = prefetcher
        self.loader = loader
        self.waiters = waiters
        self.counters = counters
        self.times = times
        self._clock = clock

    # Requests.

    def add_waiter(self, digest: str, now_s: float, count: bool = True) -> None:
        """Adds a waiter for this adapter, and begins its load if need be. `count`: it is a new
        request."""
        self.waiters[digest] += 1
        if count:
            self._count_lookup(digest)
        self.prefetcher.on_request(digest, now_s, count=count)
        self.loader.ensure_loading(digest, now_s)

    def remove_waiter(self, digest: str, *, expired: bool = False) -> None:
        """Removes a waiter. A load that nobody waits for is abandoned, unless the last waiter only
        `expired` and bytes are arriving: then the next request shall find it."""
        self._decrement_waiters(digest)
        load = self.loads.get(digest)
        if load is None or self.waiters[digest]:
            return
        if expired and load.state is LoadState.PULLING and load.header is not None:
            self.loads.keep_without_waiter(digest)
            return
        self.loader.abandon(digest)

    def ensure_loading(self, digest: str, now_s: float) -> None:
        """Begins the load of an adapter that is neither resident nor on its way."""
        self.loader.ensure_loading(digest, now_s)

    def is_resident(self, digest: str) -> bool:
        """Returns whether `acquire` may be called."""
        resident = self.device.get(digest)
        return resident is not None and resident.ready and not resident.draining

    def is_schedulable(self, digest: str) -> bool:
        """Returns whether a new request may use it: not if it drains for a load that has waited
        too long."""
        return self.is_resident(digest) and digest not in self.drains

    def acquire(self, digest: str) -> int:
        """Returns the slot of a ready adapter, held until `release`, to a waiter."""
        resident = self.device.acquire(digest, time.time())
        self._decrement_waiters(digest)
        return resident.slot

    def release(self, digest: str) -> None:
        """Releases the slot that `acquire` held; an unloaded adapter is freed with its last
        user."""
        resident = self.device.release(digest)
        if resident.draining and resident.users == 0:
            self._evict(digest)

    def store_wait_since_s(self, digest: str) -> float | None:
        """Returns when the wait for the store began; None while it does not wait for the store."""
        return self.loads.store_wait_since_s(digest)

    def wait_reason(self, digest: str, now_s: float) -> str:
        """Returns why an adapter waits for the store, as a caller may know it, and how the caller
        can help."""
        return self.loader.wait_reason(digest, now_s)

    def last_progress_s(self, digest: str) -> float | None:
        """Returns when bytes last arrived, or the load began; None while it does not wait for the
        store."""
        return self.loads.last_progress_s(digest)

    def trace_load(self, digest: str, parent: SpanContext, now_s: float) -> SpanContext | None:
        """Traces the load of this adapter, if there is one, as a part of `parent`. If it is a part
        of something else already, returns the load's own span, to be linked to."""
        return self.loads.trace(digest, parent, now_s)

    # The engine's step.

    def set_layout(self, layout_id: str) -> None:
        """Lets pulls start; the store knows our layout by this id."""
        self.loader.set_layout(layout_id)

    def on_pull_event(self, event: PullEvent, now_s: float) -> None:
        self.loader.on_pull_event(event, now_s)

    def advance(self, now_s: float, in_order: Iterable[tuple[str, bool]]) -> None:
        """See `Loader.advance`."""
        self.loader.advance(now_s, in_order)

    def finish_copies(self, digests: Iterable[str], now_s: float) -> None:
        """Publishes images whose copies into the arena are complete."""
        for digest in digests:
            self.loader.finish_copy(digest, now_s)

    def finish_dividing(self, digest: str, error: ServiceError | None) -> None:
        """Publishes an image whose magnitudes are divided; or fails its load, if they cannot be."""
        self.loader.finish_dividing(digest, error)

    @property
    def is_copying(self) -> bool:
        """Returns whether something is on its way into the arena that no message tells of."""
        return bool(self.tiers.copies or self.tiers.dividing)

    def next_expiry_s(self) -> float | None:
        """Returns when `advance` is to be called again if nothing happens before."""
        return self.loader.next_expiry_s()

    def pop_changes(self) -> tuple[ResidencyChange, ...]:
        """Returns the changes that take effect with the next batch."""
        return self.tiers.pop_changes()

    def pop_ready(self) -> list[str]:
        """Returns the adapters that may have become schedulable, or ceased to be, since the last
        call."""
        return self.tiers.pop_ready()

    def pop_failures(self) -> list[tuple[str, ServiceError]]:
        """Returns the digests that could not be loaded since the last call, each once: their
        waiters are to be ended."""
        return self.loader.pop_failures()

    def pop_spans(self) -> tuple[Span, ...]:
        """Returns the spans of loads that ended since the last call."""
        return self.loads.traces.pop_spans()

    def cancel_all(self) -> None:
        self.loader.cancel_all()

    # Operators, and registrations.

    def unload(self, digest: str) -> int:
        """Frees an adapter, once its last user is gone (`is_draining`); returns how many bytes.
        Raises AdapterNotFound, and AdapterUnusable for one that is loading or pinned."""
        resident, hosted = self.device.get(digest), self.tiers.host_resident(digest)
        tiers = self.tiers
        if digest in self.loads or digest in tiers.copies or digest in tiers.dividing:
            raise AdapterUnusable(f"adapter {digest} is still loading", subject="ref")
        if resident is None and hosted is None:
            raise AdapterNotFound(f"adapter {digest} is not resident", subject="ref")
        if resident is not None and resident.pinned:
            raise AdapterUnusable(f"adapter {digest} is pinned; unpin it first", subject="ref")
        self.prefetcher.on_removed(digest)
        freed = sum(r.num_bytes for r in (resident, hosted) if r is not None)
        if resident is None or resident.users == 0:
            self._evict(digest)
        else:
            resident.draining = True
        return freed

    def is_draining(self, digest: str) -> bool:
        resident = self.device.get(digest)
        return resident is not None and resident.draining

    def on_repointed(self, old_digest: str, new_digest: str, now_s: float) -> None:
        """Records that a name moved from one digest to the other."""
        self.prefetcher.on_repointed(old_digest, new_digest, now_s)

    def set_superseded(self, digest: str, is_superseded: bool) -> None:
        """Records that no name points to a digest any more, so that it is the first to be evicted;
        or that it is used again."""
        self.tiers.set_superseded(digest, is_superseded)
        if is_superseded:
            self.prefetcher.on_superseded(digest)

    def check_integrity(self, waiters: Counter[str]) -> None:
        """Asserts that memory, loads and `waiters`, the true ones by digest, agree."""
        assert self.waiters == waiters, "waiters without a request, or the reverse"
        self.loads.check_integrity(waiters)
        self.tiers.check_integrity(self.loads)
        self.drains.check_integrity()
        self.prefetcher.check_integrity()

    def _decrement_waiters(self, digest: str) -> None:
        assert self.waiters[digest] > 0
        self.waiters[digest] -= 1
        if not self.waiters[digest]:
            del self.waiters[digest]

    def _count_lookup(self, digest: str) -> None:
        if self.is_resident(digest):
            self.counters.device_hits += 1
        elif self.tiers.host_resident(digest) is not None:
            self.counters.host_hits += 1
        else:
            self.counters.misses += 1

    def _evict(self, digest: str) -> None:
        self.tiers.evict(digest)
        if self.waiters[digest]:
            self.loader.ensure_loading(digest, self._clock())


def build_residency(
    device: Slots,
    host: HostTier | None,
    pull_memory: memoryview,
    puller: Puller,
    *,
    max_rank: int,
    stall_s: float,
    refusal: Refusal = accept_all,
    policy: PrefetchPolicy | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Residency:
    """Makes a residency of these memories. `clock` is the clock of the times it is given.

    `device` accounts for the arena. Without a `host` tier (CPU) pulls write into the arena, whose
    bytes `pull_memory` then is. Nothing is prefetched without a `policy`.
    """
    times, counters, waiters = LoadTimes(), LoadCounters(), Counter[str]()
    loads, drains = Loads(), Drains(device)
    tiers = MemoryTiers(device, host, times)
    placement = Placement(tiers, loads, drains, waiters, puller, pull_memory, times)
    prefetcher = Prefetcher(policy, tiers, loads, placement, waiters)
    loader = Loader(
        tiers,
        loads,
        placement,
        prefetcher,
        puller,
        waiters,
        counters,
        times,
        max_rank=max_rank,
        stall_s=stall_s,
        refusal=refusal,
    )
    return Residency(tiers, loads, drains, prefetcher, loader, waiters, counters, times, clock)
