"""How the store stands, for operators and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from adapter_store.catalog import CatalogCounts
from adapter_store.images import ImageInProgress
from adapter_store.metrics import Sample
from adapter_store.pull import ActivePull
from adapter_store.tiers import TierCounts


@dataclass(frozen=True, slots=True)
class StoreStatus:
    catalog: CatalogCounts
    memory: TierCounts
    disk: TierCounts
    active_pulls: int
    active_watches: int
    shared: TierCounts | None = None
    """What this replica found in the tier shared with others; its size is not known here."""
    images_in_progress: int = 0
    images_waiting_for_room: int = 0


@dataclass(frozen=True, slots=True)
class StoreWork:
    """What the store is doing."""

    num_registrations: int
    num_uploads: int
    num_queued_ahead: int
    images: list[ImageInProgress]
    pulls: list[ActivePull]


def samples(status: StoreStatus) -> list[Sample]:
    """The status as metrics; `tier` is memory, disk or, where there is one, shared."""
    found = [
        Sample("revision", status.catalog.revision),
        Sample("adapters", status.catalog.adapters),
        Sample("layouts", status.catalog.layouts),
        Sample("blob_bytes", status.catalog.blob_bytes),
        Sample("active_pulls", status.active_pulls),
        Sample("active_watches", status.active_watches),
        Sample("images_in_progress", status.images_in_progress),
        Sample("images_waiting_for_room", status.images_waiting_for_room),
    ]
    for tier, counts in (("memory", status.memory), ("disk", status.disk)):
        found += [*_sizes(tier, counts), *_lookups(tier, counts), *_evictions(tier, counts)]
    if status.shared is not None:
        found += _lookups("shared", status.shared)
    return found


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
