"""The two memories that hold images, the host tier and the arena, and changes to the arena.

Plain bookkeeping: changes to the arena are data that ride in a batch; the backend, which has the
bytes of both, makes them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from contract.images.header import ImageHeader
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.load_states import Load, Loads, LoadState
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import Reservation, Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.pulls.registration import RegisteredImage

logger = logging.getLogger(__name__)

MAX_HOST_IMAGES = 1 << 16
STEP_COPY_BYTES = 24 << 20
"""Bytes copied before one step: some 5 ms where a core copies 5 GB/s. Copying everything that a
burst of requests waits for at once would delay every decode by many times a step's length."""


@dataclass(frozen=True, slots=True)
class TableWrite:
    """Makes an image visible to kernels in its row; its bytes are already in the arena. Its part in
    another stage may have more than A and B."""

    resident: Resident
    has_more_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class TableClear:
    """Takes a row away from kernels."""

    slot: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Starts to copy an image from the host tier into the arena; a TableWrite is due once it is
    complete. The bytes come from `mapped`, if there is one, which is then released."""

    host: Resident
    resident: Resident
    mapped: RegisteredImage | None = None


@dataclass(frozen=True, slots=True)
class MixWrite:
    """Makes a sum of adapters visible at `slot` of the table's mixes: their slots and scales."""

    slot: int
    parts: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DivideMagnitudes:
    """Starts to divide the magnitudes of an image that lies in the arena by the norms of the
    outputs that they scale; a TableWrite is due once that is done."""

    resident: Resident


ResidencyChange = TableWrite | TableClear | HostCopy | DivideMagnitudes | MixWrite


@dataclass
class PendingChanges:
    """Changes that were decided and ride in no batch yet, in order. At most `max_copied_bytes` are
    copied before one step; None: any number."""

    max_copied_bytes: int | None = None
    _changes: list[ResidencyChange] = field(default_factory=list)

    def append(self, change: ResidencyChange) -> None:
        self._changes.append(change)

    def pop(self) -> tuple[ResidencyChange, ...]:
        """Removes and returns all but the copies that exceed `max_copied_bytes`.

        The first copy is returned of any size; copies left out are the first the next time. Changes
        that overtake them concern other images: an image that is being copied does not change.
        """
        popped: list[ResidencyChange] = []
        left: list[ResidencyChange] = []
        num_bytes = 0
        for change in self._changes:
            if isinstance(change, HostCopy) and self.max_copied_bytes is not None:
                after = num_bytes + change.host.num_bytes
                if left or (num_bytes and after > self.max_copied_bytes):
                    left.append(change)
                    continue
                num_bytes = after
            popped.append(change)
        self._changes = left
        return tuple(popped)


class HostTier:
    """Accounts for `num_bytes` of host memory, one copy away from the arena. At most
    `step_copy_bytes` are copied before one step; None: any number, where copies run concurrently
    with the steps.
    """

    def __init__(self, num_bytes: int, step_copy_bytes: int | None = STEP_COPY_BYTES) -> None:
        assert num_bytes > 0
        self.step_copy_bytes = step_copy_bytes
        self.slots = Slots(num_bytes, MAX_HOST_IMAGES)


@dataclass(frozen=True, slots=True)
class InFlightCopy:
    """A host image on its way into the arena. The copy is the last part of `load`; None: no request
    waits for it."""

    change: HostCopy
    started_s: float
    load: Load | None


class MemoryTiers:
    """The arena, which `device` accounts for, and the `host` tier, which a CPU does without.

    Pulls write to the `pull_tier`: the host tier, or the arena where there is none. `copies` are
    those in flight by digest, from the decision to the last byte; each pins its host image.
    `filling` are registered images whose bytes are still being copied to the host tier; each pins
    its host image, too.
    `dividing` are images that are complete in the arena but for their magnitudes.
    """

    def __init__(self, device: Slots, host: HostTier | None, times: LoadTimes) -> None:
        assert host is None or host.slots is not device
        self.device = device
        self.host = host
        self.pull_tier = device if host is None else host.slots
        self.copies: dict[str, InFlightCopy] = {}
        self.filling: dict[str, RegisteredImage] = {}
        self.dividing: dict[str, Resident] = {}
        self._leaving: set[str] = set()
        self._times = times
        self.changes = PendingChanges(None if host is None else host.step_copy_bytes)
        self._moved: list[str] = []

    def host_resident(self, digest: str) -> Resident | None:
        """Returns its complete image in the host tier, if there is one."""
        resident = None if self.host is None else self.host.slots.get(digest)
        return resident if resident is not None and resident.ready else None

    def pin_on_host(self, digest: str) -> Resident:
        """Protects its host image from eviction until `unpin_on_host`."""
        assert self.host is not None
        self._leaving.discard(digest)
        return self.host.slots.acquire(digest, time.time())

    def unpin_on_host(self, digest: str) -> None:
        assert self.host is not None
        self.host.slots.release(digest)

    def reserve_for_pull(
        self,
        header: ImageHeader,
        keep: Collection[str],
        waited_for: Collection[str],
        reason: EvictionReason,
    ) -> Reservation | None:
        """Reserves memory for an image in the pull tier; see `Slots.reserve`."""
        if self.host is None:
            return self.reserve_on_device(header, keep, waited_for, reason)
        reservation = self.host.slots.reserve(header, keep, waited_for, reason)
        if reservation is not None:
            for evicted in reservation.evicted:
                self._times.observe_host_eviction(evicted)
        return reservation

    def reserve_on_device(
        self,
        header: ImageHeader,
        keep: Collection[str],
        waited_for: Collection[str],
        reason: EvictionReason,
    ) -> Reservation | None:
        """Reserves memory and a row for an image in the arena; see `Slots.reserve`."""
        reservation = self.device.reserve(header, keep, waited_for, reason)
        if reservation is not None:
            for evicted in reservation.evicted:
                logger.debug("evicted", extra={"digest": evicted.digest})
                self._times.observe_device_eviction(evicted)
                self.changes.append(TableClear(evicted.slot))
                self._moved.append(evicted.digest)
        return reservation

    def start_copy(self, host: Resident, target: Resident, now_s: float, load: Load | None) -> None:
        """Copies a pinned host image to the arena with the next batch that has capacity for it; see
        `InFlightCopy` for `load`."""
        assert host.users > 0, "a copy's source may be evicted"
        mapped = self.filling.get(host.digest)
        if mapped is not None and not mapped.hold():
            mapped = None  # the host tier has all of it by now
        change = HostCopy(host, target, mapped)
        self.copies[host.digest] = InFlightCopy(change, now_s, load)
        self.changes.append(change)

    def begin_filling(self, digest: str, mapped: RegisteredImage) -> None:
        """Copies of a ready host image come from `mapped` until `end_filling`."""
        self.pin_on_host(digest)
        self.filling[digest] = mapped

    def end_filling(self, digest: str) -> None:
        """The host tier has all bytes of an image, which goes now if it was freed meanwhile and is
        not used again."""
        del self.filling[digest]
        self.unpin_on_host(digest)
        if digest in self._leaving:
            self._leaving.discard(digest)
            self._evict_from_host(digest)

    def end_copy(self, digest: str) -> InFlightCopy:
        """Publishes an image whose copy is complete, and returns the copy."""
        copy = self.copies.pop(digest)
        self.unpin_on_host(digest)
        self.publish(copy.change.resident, copy.change.host.load_seconds)
        return copy

    def publish(self, resident: Resident, load_seconds: float) -> None:
        """Makes an image, complete in the arena, visible to kernels with the next batch, or, if it
        has magnitudes, when these are divided."""
        resident.load_seconds = load_seconds
        if any(segment.kind is SegmentKind.MAGNITUDE for segment in resident.header.segments):
            self.dividing[resident.digest] = resident
            self.changes.append(DivideMagnitudes(resident))
        else:
            self._publish(resident)

    def end_dividing(self, digest: str, *, is_sound: bool) -> None:
        """Publishes an image whose magnitudes are divided, or removes it."""
        resident = self.dividing.pop(digest)
        if is_sound:
            self._publish(resident)
        else:
            self.device.remove(digest)

    def _publish(self, resident: Resident) -> None:
        self.changes.append(TableWrite(resident))
        resident.ready = True
        resident.last_used_time_s = time.time()
        self._moved.append(resident.digest)

    def write_mix(self, slot: int, parts: tuple[tuple[int, float], ...]) -> None:
        """Makes a sum of resident adapters visible to kernels with the next batch."""
        self.changes.append(MixWrite(slot, parts))

    def evict(self, digest: str) -> None:
        """Frees it in both tiers; nothing may be using it."""
        if digest in self.device:
            self.changes.append(TableClear(self.device.remove(digest).slot))
            self.device.evictions[EvictionReason.UNLOAD] += 1
        if digest in self.filling:
            self._leaving.add(digest)
        else:
            self._evict_from_host(digest)

    def _evict_from_host(self, digest: str) -> None:
        hosted = self.host_resident(digest)
        if hosted is not None and not hosted.users:
            assert self.host is not None
            self.host.slots.remove(digest)
            self.host.slots.evictions[EvictionReason.UNLOAD] += 1

    def memories(self) -> dict[str, Slots]:
        """Returns the images of each tier, by the tier's name."""
        host = {} if self.host is None else {"host": self.host.slots}
        return {"device": self.device, **host}

    def mark_moved(self, digests: Iterable[str]) -> None:
        """Adds to the result of `pop_moved`."""
        self._moved += digests

    def pop_moved(self) -> list[str]:
        """Returns the adapters that were published, evicted or marked since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def check_integrity(self, loads: Loads) -> None:
        """Asserts that images, copies and `loads` agree."""
        self.device.check_integrity()
        for resident in self.device.residents():
            is_loading = resident.digest in loads or resident.digest in self.copies
            is_loading |= resident.digest in self.dividing
            assert resident.ready != is_loading, "a half-loaded image"
        pins = Counter([*self.copies, *self.filling])
        for digest, load in loads.by_digest.items():
            if load.state is LoadState.NEEDS_DEVICE_ROOM:
                pins[digest] += 1
        if self.host is None:
            assert not pins
            return
        self.host.slots.check_integrity()
        for resident in self.host.slots.residents():
            assert resident.users == pins[resident.digest], "a host image pinned for nothing"
            assert resident.ready or resident.digest in loads, "a half-pulled image"
