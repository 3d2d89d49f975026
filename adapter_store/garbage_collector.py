"""Removes blobs and images that no record points to, and images for unused layouts. Periodic."""

from __future__ import annotations

import logging
from datetime import timedelta

from adapter_store.blobs.local import Blobs
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.core import ImageKey
from adapter_store.images.tiers.disk_tier import DiskTier, Removal
from adapter_store.images.tiers.shared_tier import SharedTier
from adapter_store.replication.lease_renewal import Leases

logger = logging.getLogger(__name__)

BATCH_BLOBS = 1000
EPHEMERAL_GRACE = timedelta(seconds=10)
"""How long deleted ephemeral content can still be pulled, unless the settings say."""
LEASE = "collector"
SWEEP_EVERY = 10
"""The number of collections per sweep, which lists everything that is shared."""


class Collector:
    """Blocking. Removes records first, then files: a crash in between leaves files to be swept."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: Blobs,
        disk: DiskTier,
        delete_grace: timedelta,
        ephemeral_grace: timedelta = EPHEMERAL_GRACE,
    ) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._disk = disk
        self._delete_grace = delete_grace
        self._ephemeral_grace = min(delete_grace, ephemeral_grace)

    def sweep(self) -> None:
        """Removes leftovers of crashes, and the versions whose content was in the memory of an
        earlier process. Call it at start."""
        self._mark_recorded()
        if num_names := self._catalog.expiry.forget_memory():
            logger.info("ephemeral versions are gone", extra={"names": num_names})
        self._blobs.sweep(self._catalog.blobs.digests())
        self.drop_collected()
        self.drop_unused_layouts()

    def drop_collected(self) -> list[str]:
        """Removes the images of collected digests from the disk tier; returns these digests."""
        keys = self._disk.cached()
        gone = self._catalog.blobs.unknown(sorted({key.digest for key in keys}))
        for key in keys:
            if key.digest in gone:
                self._disk.remove(key, Removal.DELETED)
        return sorted(gone)

    def drop_unused_layouts(self) -> frozenset[str]:
        """Removes the images for unused layouts from the disk tier; returns these layouts."""
        keys = self._disk.cached()
        forgotten = {key.layout_id for key in keys} - set(self._catalog.layouts.ids())
        unused = self._catalog.layouts.unused() | forgotten
        for key in keys:
            if key.layout_id in unused:
                self._disk.remove(key, Removal.UNUSED)
        return unused

    def collect(self) -> list[str]:
        """Removes the versions whose grace has ended; returns the digests that are gone. Resets the
        images for unused layouts, and forgets layouts that were not used for long: call
        `drop_unused_layouts` next."""
        self._mark_recorded()
        num_forgotten = self._catalog.layouts.forget_unused_images()
        if num_forgotten:
            logger.info("images for unused layouts are removed", extra={"images": num_forgotten})
        while forgotten := self._catalog.layouts.forget_unused():
            logger.info("unused layouts are forgotten", extra={"layouts": len(forgotten)})
        self._catalog.servers.expire()
        self._catalog.expiry.expire()
        expired = self._catalog.expiry.expire_deleted(self._delete_grace)
        expired += self._catalog.expiry.expire_ephemeral(self._ephemeral_grace)
        self._catalog.expiry.forget_texts()
        self._forget_unrecorded()
        return self._drop_unreferenced(expired)

    def collect_due(self) -> list[str]:
        """Removes records that may not wait for `collect`: versions whose time to live has ended,
        and deleted ephemeral ones, which take memory. Returns the digests that are gone."""
        if not self._catalog.expiry.is_due(self._ephemeral_grace):
            return []
        self._catalog.expiry.expire()
        return self._drop_unreferenced(self._catalog.expiry.expire_ephemeral(self._ephemeral_grace))

    def make_room(self, tenant: str | None) -> list[str]:
        """Removes ephemeral versions that are deleted without their grace, of this tenant or of
        all: the place for it is full, and a trainer waits. Returns the digests that are gone."""
        return self._drop_unreferenced(self._catalog.expiry.expire_ephemeral(timedelta(), tenant))

    def _drop_unreferenced(self, expired: int) -> list[str]:
        """Drops the blobs that no version has; `expired` is how many versions have just gone."""
        gone = []
        while digests := self._catalog.blobs.unreferenced(BATCH_BLOBS):
            dropped = [digest for digest in digests if self._drop(digest)]
            gone += dropped
            if len(dropped) < len(digests):
                break  # registered again meanwhile
        if expired or gone:
            logger.info("collected", extra={"versions": expired, "blobs": len(gone)})
        return gone

    def _forget_unrecorded(self) -> None:
        """Lets go of blobs in memory that were not recorded after all."""
        for digest in self._catalog.blobs.unknown(self._blobs.in_memory):
            with self._blobs.guard(digest):
                if self._catalog.blobs.find(digest) is None:
                    self._blobs.remove(digest)

    def _mark_recorded(self) -> None:
        """Lets the next start notice that the catalog was lost."""
        if self._catalog.history.revision() > 0:
            self._blobs.mark_recorded()

    def _drop(self, digest: str) -> bool:
        with self._blobs.guard(digest):
            place = self._catalog.blobs.take(digest)
            if place is None:
                return False
            self._blobs.remove(digest, place)
        for layout_id in self._catalog.layouts.ids():
            self._remove_image(ImageKey(digest, layout_id))
        return True

    def _remove_image(self, key: ImageKey) -> None:
        self._disk.remove(key, Removal.DELETED)


class SharedCollector(Collector):
    """One replica collects at a time; each cleans its own disk tier."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: SharedBlobs,
        disk: DiskTier,
        delete_grace: timedelta,
        images: SharedTier,
        leases: Leases,
        ephemeral_grace: timedelta = EPHEMERAL_GRACE,
    ) -> None:
        super().__init__(catalog, blobs, disk, delete_grace, ephemeral_grace)
        self._shared_blobs = blobs
        self._images = images
        self._leases = leases
        self._num_collections = 0
        self._swept: frozenset[str] = frozenset()
        """Layouts that were unused when this replica last collected: their images are gone."""

    def collect(self) -> list[str]:
        """Collects if no other replica does; returns the digests that are gone from this replica,
        whichever replica collected them."""
        if self._leases.acquire(LEASE):
            try:
                unused = self._catalog.layouts.unused()
                gone = super().collect()
                if self._num_collections % SWEEP_EVERY == 0 or not unused <= self._swept:
                    self._shared_blobs.sweep_shared()
                    self._images.sweep(self._catalog.blobs.unknown, unused)
                self._swept = unused
                self._num_collections += 1
            finally:
                self._leases.release(LEASE)
        else:
            gone = []
        return sorted({*gone, *self.drop_collected()})

    def collect_due(self) -> list[str]:
        """Collects as Collector.collect_due does, if no other replica collects."""
        is_due = self._catalog.expiry.is_due(self._ephemeral_grace)
        if not is_due or not self._leases.acquire(LEASE):
            return []
        try:
            return super().collect_due()
        finally:
            self._leases.release(LEASE)

    def _remove_image(self, key: ImageKey) -> None:
        super()._remove_image(key)
        try:
            self._images.remove(key)
        except OSError as error:
            logger.warning("a shared image was left to be swept", extra={"why": str(error)})
