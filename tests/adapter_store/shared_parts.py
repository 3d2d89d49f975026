"""What replicas share, in one process: a catalog, a bucket, and leases per replica."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
from sqlalchemy import update

from adapter_store.blobs.local import LocalBlobs
from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.blobs.volume import Volume
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.schema import leases as lease_rows
from adapter_store.images.tiers.shared_tier import SharedTier
from adapter_store.replication.lease_renewal import Leases

WAIT_SECONDS = 60
LAYOUT_TTL = timedelta(days=7)


class SharedParts:
    def __init__(self, endpoint: str, folder: Path, stack: ExitStack) -> None:
        self.name = f"b{time.time_ns()}"
        options = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        self.client = boto3.client("s3", **options)
        self.client.create_bucket(Bucket=self.name)
        stack.callback(self.client.close)
        self.bucket = Bucket(f"s3://{self.name}/store", endpoint)
        self.now = datetime.now(UTC)
        self.catalog = Catalog(
            folder / "catalog.sqlite3",
            event_retention=100,
            layout_ttl=LAYOUT_TTL,
            clock=lambda: self.now,
        )
        stack.callback(self.catalog.close)
        self._folder = folder
        self._stack = stack

    def leases(self, lease_seconds: float = 30) -> Leases:
        leases = Leases(self.catalog.leases, lease_seconds)
        self._stack.callback(leases.close)
        return leases

    def tier(self, leases: Leases | None = None) -> SharedTier:
        """Returns the tier as another replica sees it."""
        return SharedTier(self.bucket, leases or self.leases())

    def blobs(
        self, name: str, leases: Leases | None = None, capacity: int = 1 << 30
    ) -> SharedBlobs:
        folder = self._folder / name
        local = LocalBlobs(folder)
        volume = Volume(folder, evict=lambda num_bytes: None)
        return SharedBlobs(
            local, self.bucket, self.catalog.blobs, leases or self.leases(), volume, capacity
        )

    def keys(self, under: str) -> list[str]:
        return [key for page in self.bucket.keys(under) for key in page]

    def alter(self, key: str) -> None:
        self.client.put_object(Bucket=self.name, Key=f"store/{key}", Body=b"other bytes")


def die(parts: SharedParts, leases: Leases) -> None:
    """Does what kill -9 and time do to a replica's leases: nobody renews them, and they expire."""
    with suppress(RuntimeError):
        leases.close()
    of_owner = lease_rows.c.owner == leases.owner
    with parts.catalog.database.write() as conn:
        conn.execute(update(lease_rows).where(of_owner).values(expire_time=0))
