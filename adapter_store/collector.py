"""Removes what no record points to any more. A thread's work, once in a while."""

from __future__ import annotations

import logging
from datetime import timedelta

from adapter_store.blobs import Blobs
from adapter_store.catalog import Catalog
from adapter_store.tiers import DiskTier

logger = logging.getLogger(__name__)

BATCH_BLOBS = 1000


class Collector:
    """Blocking. Records go first, then files: a crash in between leaves files to be swept."""

    def __init__(
        self, catalog: Catalog, blobs: Blobs, disk: DiskTier, delete_grace: timedelta
    ) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._disk = disk
        self._delete_grace = delete_grace

    def sweep(self) -> None:
        """At start: removes what crashes left behind."""
        known = self._catalog.blob_digests()
        self._blobs.sweep(known)
        for key in self._disk.cached():
            if key[0] not in known:
                self._disk.remove(key)

    def collect(self) -> list[str]:
        """Ends the grace of what was deleted long enough ago; gives the digests that are gone."""
        expired = self._catalog.expire_versions(self._delete_grace)
        gone = []
        while digests := self._catalog.unreferenced_blobs(BATCH_BLOBS):
            dropped = [digest for digest in digests if self._drop(digest)]
            gone += dropped
            if len(dropped) < len(digests):
                break  # registered again meanwhile
        if expired or gone:
            logger.info("collected", extra={"versions": expired, "blobs": len(gone)})
        return gone

    def _drop(self, digest: str) -> bool:
        with self._blobs.guard(digest):
            if not self._catalog.drop_blob(digest):
                return False
            self._blobs.remove(digest)
        for layout_id in self._catalog.layout_ids():
            self._disk.remove((digest, layout_id))
        return True
