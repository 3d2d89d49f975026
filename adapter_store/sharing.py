"""What a store keeps for itself, or shares with other replicas: put together by the settings."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from adapter_store.blobs.local import Blobs, LocalBlobs
from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.config import StoreSettings
from adapter_store.garbage_collector import Collector, SharedCollector
from adapter_store.images.disk_tier import DiskTier
from adapter_store.images.shared_tier import SharedTier
from adapter_store.replication.leases import Leases


@dataclass(frozen=True, slots=True)
class Kept:
    """`images` is None where nothing is shared."""

    blobs: Blobs
    collector: Collector
    images: SharedTier | None


def open_catalog(settings: StoreSettings, folder: Path, grace: timedelta) -> Catalog:
    """Raises CorruptData for one of another release, CatalogUnavailable."""
    dsn = settings.catalog_dsn
    return Catalog(
        folder / "catalog.sqlite3" if dsn is None else dsn.get_secret_value(),
        event_retention=settings.event_retention,
        delete_grace=grace,
        layout_ttl=timedelta(seconds=settings.layout_ttl_seconds),
    )


def open_kept(
    stack: ExitStack, settings: StoreSettings, folder: Path, catalog: Catalog, disk: DiskTier
) -> Kept:
    """`stack` ends what runs in the background for it."""
    grace = timedelta(seconds=settings.delete_grace_seconds)
    local = LocalBlobs(folder)
    if not settings.shared_s3:
        return Kept(local, Collector(catalog, local, disk, grace), None)
    endpoint = settings.shared_s3_endpoint_url or settings.s3_endpoint_url
    bucket = Bucket(settings.shared_s3, endpoint, settings.s3_region)
    leases = Leases(catalog, settings.lease_seconds)
    stack.callback(leases.close)
    blobs = SharedBlobs(local, bucket, catalog, leases, folder, settings.fetched_bytes)
    images = SharedTier(bucket, leases)
    return Kept(blobs, SharedCollector(catalog, blobs, disk, grace, images, leases), images)
