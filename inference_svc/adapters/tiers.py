"""The memories that an image passes through, and what of them changes with the next batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from inference_svc.adapters.changes import (
    HostCopy,
    PendingChanges,
    ResidencyChange,
    TableClear,
    TableWrite,
)
from inference_svc.adapters.copies import Copies
from inference_svc.adapters.host_tier import HostTier
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.load_traces import LoadTraces
from inference_svc.adapters.loads import Load
from inference_svc.adapters.slots import EvictionReason, Resident, Slots

log = logging.getLogger(__name__)


@dataclass
class Memories:
    """`device` accounts for the arena. Without a `host` tier (CPU) pulls write into the arena.

    `on_left` is told of each image that was evicted from the memory that pulls write to. `news` are
    adapters of which it may have changed whether a request may start with them.
    """

    device: Slots
    host: HostTier | None
    times: LoadTimes
    traces: LoadTraces
    on_left: Callable[[str], None]
    news: list[str] = field(default_factory=list)
    copying: Copies = field(init=False)
    _changes: PendingChanges = field(default_factory=PendingChanges)

    def __post_init__(self) -> None:
        self.copying = Copies(self.times, self.traces)
        self.device.on_evict = self._on_evict
        if self.host is not None:
            self.host.slots.on_evict = self._on_host_evict

    @property
    def pulled(self) -> Slots:
        """The one that pulls write to."""
        return self.device if self.host is None else self.host.slots

    def in_host(self, digest: str) -> Resident | None:
        """Its whole image in the host tier."""
        hosted = None if self.host is None else self.host.slots.get(digest)
        return hosted if hosted is not None and hosted.ready else None

    def hold_in_host(self, digest: str) -> Resident:
        """It stays in the host tier until `release_in_host`."""
        assert self.host is not None
        return self.host.slots.acquire(digest, time.time())

    def release_in_host(self, digest: str) -> None:
        assert self.host is not None
        self.host.slots.release(digest)

    def copy(self, host: Resident, room: Resident, now_s: float, load: Load | None) -> None:
        """Into the arena, with the next batch that has room for it. The host image is held until
        `finish_copies`. It is the last part of `load`; None: nobody has asked for it."""
        change = HostCopy(host, room)
        self.copying.begin(change, now_s, load)
        self._changes.append(change)

    def finish_copies(self, digests: Iterable[str], now_s: float) -> None:
        """These lie in the arena, whole: they become visible with the next batch."""
        for digest in digests:
            self.release_in_host(digest)
            copy = self.copying.end(digest, now_s)
            self.arrive(copy.resident, copy.host.load_seconds)

    def arrive(self, resident: Resident, load_seconds: float) -> None:
        """Its bytes are in the arena."""
        self._changes.append(TableWrite(resident))
        resident.ready = True
        resident.load_seconds = load_seconds
        resident.last_used_time_s = time.time()
        self.news.append(resident.digest)

    def drop(self, digest: str) -> None:
        """Frees it wherever it lies; nobody may be using it."""
        if digest in self.device:
            self._changes.append(TableClear(self.device.remove(digest).slot))
            self.device.evictions[EvictionReason.UNLOAD] += 1
        if self.in_host(digest) is not None:
            assert self.host is not None
            self.host.slots.remove(digest)
            self.host.slots.evictions[EvictionReason.UNLOAD] += 1

    def pop_changes(self) -> tuple[ResidencyChange, ...]:
        """What takes effect with the next batch."""
        return self._changes.take(None if self.host is None else self.host.step_copy_bytes)

    def pop_ready(self) -> list[str]:
        """`news` since the last call."""
        news, self.news = self.news, []
        return news

    def _on_evict(self, resident: Resident) -> None:
        log.debug("evicted", extra={"digest": resident.digest})
        self.times.left_device(resident)
        self._changes.append(TableClear(resident.slot))
        self.news.append(resident.digest)
        if self.host is None:
            self.on_left(resident.digest)

    def _on_host_evict(self, resident: Resident) -> None:
        self.times.left_host(resident)
        self.on_left(resident.digest)
