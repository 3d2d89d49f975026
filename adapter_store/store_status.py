"""The state of the store, for operators and for Prometheus."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from adapter_store.blobs.volume import Volume
from adapter_store.catalog.tables.usage import CatalogCounts
from adapter_store.images.pull import ActivePull
from adapter_store.images.tiers.cache import ImageInProgress
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.images.tiers.memory_lock import NOT_LOCKED, LockStatus, swap_bytes
from servicekit.shares import PlaceUse
from servicekit.telemetry.metrics import Sample
from servicekit.telemetry.place_metrics import place_samples


@dataclass(frozen=True, slots=True)
class Work:
    """The contents and the work of this replica: available even if the catalog is not."""

    memory: TierCounts
    disk: TierCounts
    active_pulls: int
    active_watches: int
    shared: TierCounts | None = None
    """This replica's hits in the tier that replicas share; the size of that tier is not known."""
    images_in_progress: int = 0
    images_waiting_for_room: int = 0
    places: tuple[PlaceUse, ...] = ()
    """The resources that callers share."""
    lock: LockStatus = NOT_LOCKED
    """Whether the memory of images is locked."""


@dataclass(frozen=True, slots=True)
class WorkDetails:
    """The work of this replica, in detail."""

    num_registrations: int
    num_uploads: int
    num_queued: int
    images: list[ImageInProgress]
    pulls: list[ActivePull]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    catalog: CatalogCounts
    work: Work


def catalog_samples(counts: CatalogCounts) -> list[Sample]:
    """Returns the catalog's totals as metrics."""
    return [
        Sample("revision", counts.revision),
        Sample("adapters", counts.adapters),
        Sample("layouts", counts.layouts),
        Sample("blob_bytes", counts.blob_bytes),
    ]


def work_samples(work: Work) -> list[Sample]:
    """Returns a replica's state as metrics; `tier` is memory, disk or, if there is one, shared."""
    found = [
        Sample("active_pulls", work.active_pulls),
        Sample("active_watches", work.active_watches),
        Sample("images_in_progress", work.images_in_progress),
        Sample("images_waiting_for_room", work.images_waiting_for_room),
    ]
    for tier, counts in (("memory", work.memory), ("disk", work.disk)):
        found += [*_sizes(tier, counts), *_lookups(tier, counts), *_evictions(tier, counts)]
    if work.lock.is_wanted:
        found.append(Sample("memory_locked", int(work.lock.is_locked)))
    found.append(Sample("swap_bytes", swap_bytes()))
    if work.shared is not None:
        found += _lookups("shared", work.shared)
    for use in work.places:
        found += place_samples(use)
    return found


def volume_samples(volume: Volume) -> list[Sample]:
    """Returns the space of the data folder's file system; nothing if that does not answer."""
    try:
        usage = shutil.disk_usage(volume.folder)
        is_full = not volume.has_space()
    except OSError:
        return []
    return [
        Sample("volume_free_bytes", usage.free),
        Sample("volume_capacity_bytes", usage.total),
        Sample("volume_full", is_full),
    ]


def _sizes(tier: str, counts: TierCounts) -> list[Sample]:
    return [
        Sample("tier_capacity_bytes", counts.capacity_bytes, (tier,)),
        Sample("tier_used_bytes", counts.used_bytes, (tier,)),
        Sample("tier_images", counts.images, (tier,)),
    ]


def _lookups(tier: str, counts: TierCounts) -> list[Sample]:
    return [
        Sample("tier_hits", counts.hits, (tier,)),
        Sample("tier_misses", counts.misses, (tier,)),
    ]


def _evictions(tier: str, counts: TierCounts) -> list[Sample]:
    by_reason = {"room": counts.evictions} | {
        reason.value: count for reason, count in counts.removals.items()
    }
    return [Sample("tier_evictions", count, (tier, reason)) for reason, count in by_reason.items()]
