"""Who waits for which adapter, who uses it, and what operators ask for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from inference_svc.adapters.loader import Loader
from inference_svc.adapters.loads import Load, LoadState
from inference_svc.errors import AdapterNotFound, AdapterUnusable
from inference_svc.spans import Span, SpanContext


@dataclass
class Residency(Loader):
    """From a digest to a slot and back. How an adapter comes in is the Loader's part."""

    # What requests ask for.

    def add_waiter(self, digest: str, now_s: float, count: bool = True) -> None:
        """One more waits for this adapter; starts its load if need be."""
        self._waiters[digest] += 1
        if count:
            self._count(digest)
        if self.prefetch is not None:
            self.prefetch.wanted(digest, now_s, count=count)
        self.ensure_loading(digest, now_s)

    def remove_waiter(self, digest: str, *, expired: bool = False) -> None:
        """One waits no more. A load that nobody waits for is abandoned, unless the last waiter
        only `expired` and bytes are arriving: then the next request shall find it."""
        self._waited(digest)
        load = self._loads.get(digest)
        if load is None or self._waiters[digest]:
            return
        if expired and load.state is LoadState.PULLING and load.header is not None:
            self._loads.keep_unwanted(digest)
            return
        self._abandon(digest, load)

    def trace_load(self, digest: str, asker: SpanContext, now_s: float) -> SpanContext | None:
        """What is on its way for a request becomes a part of what `asker` does. If it is a part of
        something else already, the load's own span, to be linked to."""
        return self._loads.trace(digest, asker, now_s)

    def pop_spans(self) -> tuple[Span, ...]:
        """Of loads that are over, each once."""
        return self._loads.traces.take()

    def is_resident(self, digest: str) -> bool:
        """Whether `acquire` may be called."""
        resident = self.device.get(digest)
        return resident is not None and resident.ready and not resident.draining

    def is_schedulable(self, digest: str) -> bool:
        """Whether one more should use it: no, if it is to make room for one that waited longer."""
        return self.is_resident(digest) and digest not in self._rooms.drains

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

    def store_wait_since_s(self, digest: str) -> float | None:
        """When the wait for the store began; None while it waits for nothing of the store."""
        return self._loads.store_wait_since_s(digest)

    def last_progress_s(self, digest: str) -> float | None:
        """When bytes last arrived, or the load began; None while it does not wait on the store."""
        return self._loads.last_progress_s(digest)

    # What operators ask for, and registrations.

    def unload(self, digest: str) -> int:
        """Drains and frees; returns the bytes that this frees, maybe later (`is_draining`)."""
        resident, hosted = self.device.get(digest), self._memories.in_host(digest)
        if digest in self._loads or digest in self._memories.copying:
            raise AdapterUnusable(f"adapter {digest} is still loading", subject="ref")
        if resident is None and hosted is None:
            raise AdapterNotFound(f"adapter {digest} is not resident", subject="ref")
        if resident is not None and resident.pinned:
            raise AdapterUnusable(f"adapter {digest} is pinned; unpin it first", subject="ref")
        if self.prefetch is not None:
            self.prefetch.forget(digest)
            self.prefetch.left(digest)
        freed = sum(r.num_bytes for r in (resident, hosted) if r is not None)
        if resident is None or resident.users == 0:
            self._drop(digest)
        else:
            resident.draining = True
        return freed

    def on_repointed(self, old_digest: str, new_digest: str, now_s: float) -> None:
        """A name that pointed to one now points to the other."""
        if self.prefetch is not None:
            self.prefetch.on_repointed(old_digest, new_digest, now_s)

    def is_draining(self, digest: str) -> bool:
        resident = self.device.get(digest)
        return resident is not None and resident.draining

    # What those see who look for what is wrong.

    @property
    def loads_by_digest(self) -> Mapping[str, Load]:
        """Adapters on their way; those that are being copied have left it."""
        return self._loads.by_digest

    def num_waiters(self, digest: str) -> int:
        """Requests, and operators, that wait for it."""
        return self._waiters[digest]

    # The engine's end.

    @property
    def num_loading(self) -> int:
        """Pulls whose threads may still write."""
        return sum(load.job is not None for load in self._loads.by_digest.values())

    def cancel_all(self) -> None:
        for load in self._loads.by_digest.values():
            if load.job is not None:
                self.puller.cancel(load.job)

    # Within.

    def check_integrity(self, waiters: Counter[str]) -> None:
        """Asserts that memory, loads and `waiters`, the true ones by digest, agree."""
        assert self._waiters == waiters, "waiters without a request, or the reverse"
        self.device.check_integrity()
        for resident in self.device.residents():
            is_coming = resident.digest in self._loads or resident.digest in self._memories.copying
            assert resident.ready != is_coming, "a half-loaded image"
        self._loads.check_integrity(waiters)
        held = Counter(self._memories.copying)
        for digest, load in self._loads.by_digest.items():
            held[digest] += load.state is LoadState.NEEDS_DEVICE_ROOM
        if self.host is None:
            assert not +held
            return
        self.host.slots.check_integrity()
        for hosted in self.host.slots.residents():
            assert hosted.users == held[hosted.digest], "a host image held for nothing"
            assert hosted.ready or hosted.digest in self._loads, "a half-pulled image"

    def _waited(self, digest: str) -> None:
        assert self._waiters[digest] > 0
        self._waiters[digest] -= 1
        if not self._waiters[digest]:
            del self._waiters[digest]

    def _count(self, digest: str) -> None:
        if self.is_resident(digest):
            self.counters.device_hits += 1
        elif self._memories.in_host(digest) is not None:
            self.counters.host_hits += 1
        else:
            self.counters.misses += 1

    def _drop(self, digest: str) -> None:
        self._memories.drop(digest)
        if self._waiters[digest]:
            self.ensure_loading(digest, time.monotonic())
