"""Brings what the prefetch policy chooses, through the same loads and rooms as all else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from inference_svc.adapters.loads import Load, Loads
from inference_svc.adapters.placement import Rooms
from inference_svc.adapters.prefetch import Prefetch
from inference_svc.adapters.slots import EvictionReason, Resident
from inference_svc.adapters.tiers import Memories


@dataclass
class Ahead:
    """Without a `prefetch` policy nothing comes unasked."""

    prefetch: Prefetch | None
    memories: Memories
    loads: Loads
    rooms: Rooms
    waiters: Counter[str]

    def choose(self, now_s: float) -> str | None:
        """The digest to bring now, or None. Only while nothing is on its way that requests wait
        for."""
        if self.prefetch is None or self.loads.by_digest:
            return None
        may_leave = partial(self.memories.pulled.may_leave, self.waiters)
        return self.prefetch.choose(now_s, self._is_here, may_leave)

    def next_look_s(self) -> float | None:
        """When `choose` is to be called again; None: not before something happens."""
        if self.prefetch is None or self.loads.by_digest:
            return None
        return self.prefetch.next_look_s()

    def is_bringing(self, digest: str) -> bool:
        """Whether it is on its way, and nobody has asked for it."""
        return self.prefetch is not None and self.prefetch.current == digest

    def give_room(self, digest: str, load: Load, now_s: float) -> bool:
        """Free room, or that of what is less popular and not waited for; else not at all."""
        assert self.prefetch is not None
        assert load.header is not None
        others = {resident.digest for resident in self.memories.pulled.residents()}
        keep = self.prefetch.hotter_than(digest, others, now_s) | self.waiters.keys()
        has_room = self.rooms.give(digest, load, keep, now_s, EvictionReason.PREFETCH)
        if has_room:
            self.prefetch.opened(load.header.total_bytes, now_s)
        return has_room

    def pulled(self, num_bytes: int, seconds: float) -> None:
        """Anything has been pulled, and took so long."""
        if self.prefetch is not None:
            self.prefetch.budget.measured(num_bytes, seconds)

    def arrived(self, resident: Resident, now_s: float) -> None:
        """It lies where pulls write to. From a host tier it goes on where room is free."""
        assert self.prefetch is not None
        self.prefetch.arrived(now_s)
        memories = self.memories
        if memories.host is None:
            return
        others = {other.digest for other in memories.device.residents()}
        on_device = memories.device.reserve(resident.header, others)
        if on_device is not None:
            memories.hold_in_host(resident.digest)
            memories.copy(resident, on_device, now_s, None)

    def failed(self, digest: str, now_s: float, *, is_cancelled: bool) -> None:
        """A load has ended without an image."""
        if self.prefetch is None:
            return
        if not is_cancelled:
            self.prefetch.forget(digest)
        if self.is_bringing(digest):
            self.prefetch.refused(now_s)

    def left(self, digest: str) -> None:
        """An image has left the memory that pulls write to."""
        if self.prefetch is not None:
            self.prefetch.left(digest)

    def _is_here(self, digest: str) -> bool:
        return digest in self.memories.pulled or digest in self.memories.device
