"""How the store stands, for operators and for Prometheus."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from adapter_store.catalog.usage import CatalogCounts
from adapter_store.images.cache import ImageInProgress
from adapter_store.images.disk_tier import TierCounts
from adapter_store.images.pull import ActivePull
from servicekit.telemetry.metrics import Sample


@dataclass(frozen=True, slots=True)
class Work:
    """What this replica has and does: known also while the catalog is not."""

    memory: TierCounts
    disk: TierCounts
    active_pulls: int
    active_watches: int
    shared: TierCounts | None = None
    """What this replica found in the tier shared with others; its size is not known here."""
    images_in_progress: int = 0
    images_waiting_for_room: int = 0


@dataclass(frozen=True, slots=True)
class WorkDetails:
    """What the store is doing, one by one."""

    num_registrations: int
    num_uploads: int
    num_queued_ahead: int
    images: list[ImageInProgress]
    pulls: list[ActivePull]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    catalog: CatalogCounts
    work: Work


def catalog_samples(counts: CatalogCounts) -> list[Sample]:
    """The catalog as metrics."""
    return [
        Sample("revision", counts.revision),
        Sample("adapters", counts.adapters),
        Sample("layouts", counts.layouts),
        Sample("blob_bytes", counts.blob_bytes),
    ]


def work_samples(work: Work) -> list[Sample]:
    """The rest as metrics; `tier` is memory, disk or, where there is one, shared."""
    found = [
        Sample("active_pulls", work.active_pulls),
        Sample("active_watches", work.active_watches),
        Sample("images_in_progress", work.images_in_progress),
        Sample("images_waiting_for_room", work.images_waiting_for_room),
    ]
    for tier, counts in (("memory", work.memory), ("disk", work.disk)):
        found += [*_sizes(tier, counts), *_lookups(tier, counts), *_evictions(tier, counts)]
    if work.shared is not None:
        found += _lookups("shared", work.shared)
    return found


def volume_samples(folder: Path) -> list[Sample]:
    """Room on the file system that `folder` is on; nothing while that does not answer."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return []
    return [Sample("volume_free_bytes", usage.free), Sample("volume_capacity_bytes", usage.total)]


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
    left = {"room": counts.evictions} | {
        reason.value: count for reason, count in counts.removals.items()
    }
    return [Sample("tier_evictions", count, (tier, reason)) for reason, count in left.items()]
