"""How the store stands, for operators and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from adapter_store.catalog import CatalogCounts
from adapter_store.metrics import Sample
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


def samples(status: StoreStatus) -> list[Sample]:
    """The status as metrics; `tier` is memory, disk or, where there is one, shared."""
    found = [
        Sample("revision", "Newest catalog revision.", status.catalog.revision),
        Sample("adapters", "Names in the catalog.", status.catalog.adapters),
        Sample("layouts", "Layouts that are in use.", status.catalog.layouts),
        Sample("blob_bytes", "Size of the kept sources.", status.catalog.blob_bytes),
        Sample("active_pulls", "Pulls in progress.", status.active_pulls),
        Sample("active_watches", "Watches in progress.", status.active_watches),
    ]
    for tier, counts in (("memory", status.memory), ("disk", status.disk)):
        found += _tier_samples({"tier": tier}, counts)
    if status.shared is not None:
        found += [
            each
            for each in _tier_samples({"tier": "shared"}, status.shared)
            if each.name in ("tier_hits_total", "tier_misses_total")
        ]
    return found


def _tier_samples(labels: dict[str, str], counts: TierCounts) -> list[Sample]:
    return [
        Sample("tier_capacity_bytes", "Capacity.", counts.capacity_bytes, labels),
        Sample("tier_used_bytes", "Bytes taken.", counts.used_bytes, labels),
        Sample("tier_images", "Images there.", counts.images, labels),
        Sample("tier_hits_total", "Images looked for and found.", counts.hits, labels),
        Sample("tier_misses_total", "Images looked for and not found.", counts.misses, labels),
        Sample("tier_evictions_total", "Images gone to make room.", counts.evictions, labels),
    ]
