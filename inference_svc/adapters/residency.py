"""Takes adapters from a key to a slot and back: who waits for which, and who uses it.

`build_residency` wires the parts: a `Loader` that moves `Loads`, the `MemoryTiers` that they end
in, the `Placement` that reserves memory there, and a `Prefetcher`. Each knows only the parts that
were made before it, and returns its changes for other parts. Callers use them directly for all that
concerns one part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.images.header import ImageHeader
from inference_svc.adapters.load_metrics import LoadCounters, LoadTimes
from inference_svc.adapters.load_states import Loads, LoadState
from inference_svc.adapters.loader import Loader, Refusal, accept_all
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.placement import Drains, Placement
from inference_svc.adapters.memory.tiers import HostTier, MemoryTiers, ResidencyChange
from inference_svc.adapters.prefetch import Prefetcher, PrefetchPolicy
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.adapters.sums import Mixes, WaitingSums
from inference_svc.core import AdapterKey, Digest, Sum, digests_of
from inference_svc.errors import AdapterNotFound, AdapterUnusable
from servicekit.telemetry.spans import SpanContext


@dataclass(eq=False, slots=True)
class Residency:
    """Holds adapters for requests, by key. A sum is resident when its parts are, and each of its
    requests is a waiter, or a user, of all parts.

    `waiters` counts the requests, and operators, that wait for each adapter.
    """

    tiers: MemoryTiers
    loads: Loads
    drains: Drains
    prefetcher: Prefetcher
    loader: Loader
    mixes: Mixes
    waiters: Counter[Digest]
    counters: LoadCounters
    times: LoadTimes
    clock: Callable[[], float]
    waiting_sums: WaitingSums = field(default_factory=WaitingSums)

    @property
    def device(self) -> Slots:
        return self.tiers.device

    @property
    def host(self) -> HostTier | None:
        return self.tiers.host

    # Waiting.

    def add_waiter(self, key: AdapterKey, now_s: float, count: bool = True) -> None:
        """Adds a waiter, and begins loads if need be. `count`: it is a new request."""
        if isinstance(key, Sum):
            self.waiting_sums.add(key)
        for digest in digests_of(key):
            self.waiters[digest] += 1
            if count:
                self._count_lookup(digest)
            self.prefetcher.on_request(digest, now_s, count=count)
            self.loader.load(digest, now_s)

    def load_ahead(self, digest: Digest, now_s: float) -> None:
        """Adds a waiter that is no request: an operator expects some. Prefetching counts it as one:
        else it displaces the image, which nobody has requested, before they come."""
        self.prefetcher.on_expected(digest, now_s)
        self.add_waiter(digest, now_s, count=False)

    def remove_waiter(self, key: AdapterKey, *, expired: bool = False) -> None:
        """Removes a waiter. A load that nobody waits for is abandoned, unless the last waiter only
        `expired` and bytes are arriving: then the next request shall find it."""
        if isinstance(key, Sum):
            self.waiting_sums.remove(key)
        for digest in digests_of(key):
            self._decrement_waiters(digest)
            load = self.loads.get(digest)
            if load is None or self.waiters[digest]:
                continue
            if expired and load.state is LoadState.PULLING and load.header is not None:
                self.loads.keep_without_waiter(digest)
            else:
                self.loader.abandon(digest)

    def ensure_loading(self, key: AdapterKey, now_s: float) -> None:
        """Begins the loads of adapters that are neither resident nor on their way."""
        for digest in digests_of(key):
            self.loader.load(digest, now_s)

    def trace_load(self, key: AdapterKey, parent: SpanContext, now_s: float) -> SpanContext | None:
        """Traces the loads that are under way, as parts of `parent`. Of one that is a part of
        something else already, returns its own span, to be linked to: the first such."""
        spans = [self.loads.trace(digest, parent, now_s) for digest in digests_of(key)]
        return next((span for span in spans if span is not None), None)

    def waiting_with(self, digest: Digest) -> list[AdapterKey]:
        """Returns the adapter, and the waiting sums that it is a part of."""
        return [digest, *self.waiting_sums.of_part(digest)]

    def store_waits_since_s(self, key: AdapterKey) -> dict[Digest, float]:
        """Returns the adapters that wait for the store, and since when."""
        since = {digest: self.loads.store_wait_since_s(digest) for digest in digests_of(key)}
        return {digest: since_s for digest, since_s in since.items() if since_s is not None}

    def headers(self, key: AdapterKey) -> dict[Digest, ImageHeader]:
        """Returns the headers of images that are here, or whose pull has opened."""
        found = {}
        for digest in digests_of(key):
            resident = self.device.get(digest) or self.tiers.host_resident(digest)
            load = self.loads.get(digest)
            header = resident.header if resident is not None else load.header if load else None
            if header is not None:
                found[digest] = header
        return found

    # Running.

    def is_resident(self, digest: Digest) -> bool:
        """Returns whether the adapter is ready, and no operator has unloaded it."""
        resident = self.device.get(digest)
        return resident is not None and resident.ready and not resident.draining

    def is_schedulable(self, key: AdapterKey) -> bool:
        """Returns whether `acquire` may be called for a new request: all adapters are resident, and
        none drains for a load that has waited too long."""
        return all(
            self.is_resident(digest) and digest not in self.drains for digest in digests_of(key)
        )

    def acquire(self, key: AdapterKey) -> int:
        """Returns the slot, of an adapter or of the mix of a sum, held until `release`, to a
        waiter."""
        if not isinstance(key, Sum):
            return self._acquire(key)
        self.waiting_sums.remove(key)
        parts = tuple([(self._acquire(part.digest), part.scale) for part in key.parts])
        slot, is_new = self.mixes.add_user(key)
        if is_new:
            self.tiers.write_mix(slot, parts)
        return slot

    def _acquire(self, digest: Digest) -> int:
        resident = self.device.acquire(digest, time.time())
        self._decrement_waiters(digest)
        return resident.slot

    def release(self, key: AdapterKey) -> None:
        """Releases the slot that `acquire` held; an unloaded adapter is freed with its last
        user."""
        if isinstance(key, Sum):
            self.mixes.remove_user(key)
        for digest in digests_of(key):
            resident = self.device.release(digest)
            if resident.draining and resident.users == 0:
                self._evict(digest)

    # The engine's step.

    @property
    def is_copying(self) -> bool:
        """Returns whether something is on its way into the arena that no message tells of."""
        return bool(self.tiers.copies or self.tiers.dividing)

    def pop_changes(self) -> tuple[ResidencyChange, ...]:
        """Returns the changes that take effect with the next batch."""
        return self.tiers.changes.pop()

    def pop_ready(self) -> list[AdapterKey]:
        """Returns the keys that may have become schedulable, or ceased to be, since the last
        call."""
        moved = self.tiers.pop_moved()
        return list(dict.fromkeys(key for digest in moved for key in self.waiting_with(digest)))

    # Operators, and registrations.

    def unload(self, digest: Digest) -> int:
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

    def is_draining(self, digest: Digest) -> bool:
        resident = self.device.get(digest)
        return resident is not None and resident.draining

    def set_superseded(self, digest: Digest, is_superseded: bool) -> None:
        """Records that no name points to a digest any more, so that it is the first to be evicted;
        or that it is used again."""
        for slots in self.tiers.memories().values():
            slots.set_superseded(digest, is_superseded)
        if is_superseded:
            self.prefetcher.on_superseded(digest)

    def check_integrity(
        self, waiting: Counter[AdapterKey], running: Counter[AdapterKey] | None = None
    ) -> None:
        """Asserts that memory and loads agree with the requests, and operators, that wait for each
        key, and, if given, with the requests that run with it."""
        waiters = Counter(digest for key in waiting.elements() for digest in digests_of(key))
        assert self.waiters == waiters, "waiters without a request, or the reverse"
        self.loads.check_integrity(waiters)
        self.tiers.check_integrity(self.loads)
        self.drains.check_integrity()
        self.prefetcher.check_integrity()
        self.waiting_sums.check_integrity(waiting)
        if running is None:
            return
        self.mixes.check_integrity(running)
        users = Counter(digest for key in running.elements() for digest in digests_of(key))
        for resident in self.device.residents():
            assert resident.users == users[resident.digest], "a slot held without a request"

    def _decrement_waiters(self, digest: Digest) -> None:
        assert self.waiters[digest] > 0
        self.waiters[digest] -= 1
        if not self.waiters[digest]:
            del self.waiters[digest]

    def _count_lookup(self, digest: Digest) -> None:
        if self.is_resident(digest):
            self.counters.device_hits += 1
        elif self.tiers.host_resident(digest) is not None:
            self.counters.host_hits += 1
        else:
            self.counters.misses += 1

    def _evict(self, digest: Digest) -> None:
        self.tiers.evict(digest)
        if self.waiters[digest]:
            self.loader.load(digest, self.clock())


def build_residency(
    device: Slots,
    host: HostTier | None,
    pull_memory: memoryview,
    puller: Puller,
    *,
    max_rank: int,
    stall_s: float,
    num_mixes: int = 0,
    refusal: Refusal = accept_all,
    policy: PrefetchPolicy | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Residency:
    """Makes a residency of these memories. `clock` is the clock of the times it is given. The table
    has `num_mixes` mixes for sums after its rows.

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
    mixes = Mixes(device.max_images, num_mixes)
    return Residency(
        tiers, loads, drains, prefetcher, loader, mixes, waiters, counters, times, clock
    )
