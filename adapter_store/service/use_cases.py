"""All use cases of one store."""

from __future__ import annotations

from dataclasses import dataclass

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.layout_usage import LayoutUsage
from adapter_store.catalog.presence import Presence
from adapter_store.catalog.watch import Watch
from adapter_store.images.precompile import Precompiler
from adapter_store.images.pull import Pulls
from adapter_store.images.share import Offers
from adapter_store.images.stored_source import StoredSources
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.metrics.registry import Metrics
from adapter_store.registration.registrar import Registrar
from adapter_store.registration.tenant_policy import StorePolicyFile
from adapter_store.service.calls import Calls, Places
from adapter_store.service.changes import Changes
from adapter_store.service.editing import Editing
from adapter_store.service.exporting import Exporting
from adapter_store.service.layouts import LayoutRegistry
from adapter_store.service.reading import Reading
from adapter_store.service.registering import Registering
from adapter_store.service.status import StatusReader
from adapter_store.service.warm_images import StandingImages
from adapter_store.service.watching import Watching
from servicekit.shares import INTERNAL


@dataclass(frozen=True, slots=True)
class UseCases:
    registering: Registering
    editing: Editing
    reading: Reading
    exporting: Exporting
    watching: Watching
    layouts: LayoutRegistry
    pulls: Pulls
    status: StatusReader
    standing: StandingImages
    calls: Calls
    presence: Presence
    layout_usage: LayoutUsage

    async def close(self) -> None:
        """Ends their own background work."""
        await self.presence.close()
        await self.layout_usage.wait_idle()


def make_use_cases(
    catalog: Catalog,
    registrar: Registrar,
    sources: StoredSources,
    images: ImageCache,
    precompiler: Precompiler,
    watch: Watch,
    metrics: Metrics,
    policies: StorePolicyFile,
    places: Places,
    shared: TierCounts | None,
    offers: Offers | None = None,
) -> UseCases:
    """Makes the use cases. `shared` counts the tier that replicas share, if there is one; `offers`
    are this machine's, if it has a socket for them."""
    calls, internal = Calls(places), places.calls.of(INTERNAL)
    standing = StandingImages(calls, catalog.layouts, catalog.images, images, precompiler)
    changes = Changes(standing)
    layout_usage = LayoutUsage(catalog.layouts, internal, standing.resume)
    presence = Presence(catalog.servers, internal, layout_usage.record)
    pulls = Pulls(images, metrics, layout_usage.record, places.pulled_bytes, offers)
    status = StatusReader(
        catalog.counts,
        calls,
        places,
        changes,
        registrar,
        images,
        precompiler,
        pulls,
        watch,
        shared,
    )
    capacity = images.memory_counts.capacity_bytes
    return UseCases(
        Registering(calls, places, changes, registrar, policies, metrics),
        Editing(calls, catalog.names, changes, standing, policies, capacity),
        Reading(calls, catalog.names, images),
        Exporting(calls, catalog.names, sources),
        Watching(watch, presence),
        LayoutRegistry(calls, catalog.layouts, catalog.servers, standing),
        pulls,
        status,
        standing,
        calls,
        presence,
        layout_usage,
    )
