"""Reserves memory for loads, by eviction or, after too long a wait, by draining adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain

from contract.images.header import ImageHeader
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.load_states import Load, Loads, LoadState
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import MemoryTiers
from inference_svc.adapters.pulls.pull import ImageSink
from inference_svc.adapters.pulls.threads import Puller


@dataclass
class Drains:
    """Which images of `device` drain for which digest: no new request may use them until its load
    has memory."""

    device: Slots
    _chosen: dict[str, frozenset[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._chosen)

    def __contains__(self, digest: str) -> bool:
        return any(digest in chosen for chosen in self._chosen.values())

    def start(self, digest: str, header: ImageHeader, keep: Collection[str]) -> list[str]:
        """Chooses images to drain for this one, none of `keep`; returns the images that no longer
        drain.

        A choice stands as long as one of its images is in use: else different images would be
        chosen in every step, and none would ever be idle.
        """
        if self._is_in_use(digest):
            return []
        before = self._chosen.get(digest, frozenset())
        others = chain.from_iterable(self._chosen.values())
        victims = self.device.choose_drained(header, {*keep, *others} - before)
        self._chosen[digest] = frozenset(victim.digest for victim in victims or ())
        return list(before)

    def drained(self, waited_for: Collection[str]) -> list[tuple[str, set[str]]]:
        """Returns the digests for which all chosen images are idle, each with the images that it
        may not evict because others wait for them."""
        needed = {r.digest for r in self.device.residents() if r.digest in waited_for}
        return [
            (digest, needed - chosen)
            for digest, chosen in self._chosen.items()
            if not self._is_in_use(digest)
        ]

    def end(self, is_over: Callable[[str], bool]) -> list[str]:
        """Forgets the digests that are over; returns the images that no longer drain."""
        over = [digest for digest in self._chosen if is_over(digest)]
        return [drained for digest in over for drained in self._chosen.pop(digest)]

    def _is_in_use(self, digest: str) -> bool:
        residents = map(self.device.get, self._chosen.get(digest, ()))
        return any(resident is not None and resident.users for resident in residents)

    def check_integrity(self) -> None:
        """Asserts that no image drains for two."""
        chosen = list(chain.from_iterable(self._chosen.values()))
        assert len(chosen) == len(set(chosen)), "an image drains for two"


@dataclass
class Placement:
    """Reserves memory for `loads` and starts the next step of each.

    The `puller` writes to `pull_memory`. `waiters` counts the requests that wait for each digest.
    """

    tiers: MemoryTiers
    loads: Loads
    drains: Drains
    waiters: Counter[str]
    puller: Puller
    pull_memory: memoryview
    times: LoadTimes

    def reserve(
        self, digest: str, load: Load, keep: Collection[str], now_s: float, reason: EvictionReason
    ) -> list[Resident] | None:
        """Reserves the memory that a load needs, and the load proceeds.

        Evicts as few images as needed, none of `keep`, and returns them. Returns None, and evicts
        nothing, if that does not suffice.
        """
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            return self._reserve_on_device(digest, keep, now_s, reason)
        assert load.header is not None
        assert load.job is not None
        reservation = self.tiers.reserve_for_pull(load.header, keep, self.waiters, reason)
        if reservation is None:
            return None
        self.loads.on_pull_room(digest, now_s)
        load.job.last_progress_s = now_s
        if load.job.grant(ImageSink(self.pull_memory, reservation.resident.extents)):
            self.puller.start(load.job)
        return reservation.evicted

    def _reserve_on_device(
        self, digest: str, keep: Collection[str], now_s: float, reason: EvictionReason
    ) -> list[Resident] | None:
        hosted = self.tiers.host_resident(digest)
        assert hosted is not None, "the load pins it"
        reservation = self.tiers.reserve_on_device(hosted.header, keep, self.waiters, reason)
        if reservation is None:
            return None
        load = self.loads.on_device_room(digest, now_s)
        self.times.wait.observe(load.waited_s)
        self.tiers.start_copy(hosted, reservation.resident, now_s, load)
        return reservation.evicted

    def drain(self, digest: str, load: Load, keep: Collection[str]) -> None:
        """Drains images in use, none of `keep`, for a load that has waited too long."""
        if self.tiers.host is None or load.state is LoadState.NEEDS_DEVICE_ROOM:
            assert load.header is not None
            self.tiers.mark_moved(self.drains.start(digest, load.header, keep))

    def reserve_drained(self, now_s: float) -> list[Resident]:
        """Reserves drained memory for the load that it drained for, even if others are due before
        it by now, because else all would wait for each other. Returns the evicted images."""
        if not self.drains:
            return []
        evicted: list[Resident] = []
        drained = self.drains.drained(self.waiters)
        for digest, keep in drained:
            if self.loads.needs_room(digest):
                load = self.loads[digest]
                evicted += self.reserve(digest, load, keep, now_s, EvictionReason.AGED) or ()
        over = {digest for digest, _ in drained}
        self._end_drains(lambda digest: digest in over or not self.loads.needs_room(digest))
        return evicted

    def end_drains(self) -> None:
        """Ends the drains for loads that need no memory any more."""
        self._end_drains(lambda digest: not self.loads.needs_room(digest))

    def _end_drains(self, is_over: Callable[[str], bool]) -> None:
        self.tiers.mark_moved(self.drains.end(is_over))
