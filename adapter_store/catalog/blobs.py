"""Which blobs the records refer to, and where these are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import select

from adapter_store.catalog.database import Database
from adapter_store.catalog.tables import leftovers, schema
from adapter_store.catalog.tables import version_rows as rows
from adapter_store.catalog.tables.leftovers import BlobKey
from adapter_store.core import BlobPlace


class BlobRecords:
    def __init__(self, database: Database) -> None:
        self._database = database

    def digests(self) -> set[str]:
        with self._database.read() as conn:
            return set(conn.scalars(select(schema.blobs.c.digest)))

    def find(self, digest: str) -> BlobPlace | None:
        """Returns where a blob is stored, or None if there is none."""
        with self._database.read() as conn:
            return rows.find_blob(conn, digest)

    def unknown(self, digests: Sequence[str]) -> set[str]:
        """Returns the digests that no blob has."""
        with self._database.read() as conn:
            return leftovers.unknown(conn, digests)

    def unreferenced(self, limit: int) -> list[str]:
        with self._database.read() as conn:
            return leftovers.unreferenced(conn, limit)

    def take(self, digest: str) -> str | None:
        """See leftovers.take_blob."""
        with self._database.write() as conn:
            return leftovers.take_blob(conn, digest)

    def orphans(self, leases_by_place: Mapping[BlobKey, str]) -> set[BlobKey]:
        """See leftovers.orphans."""
        with self._database.write() as conn:
            return leftovers.orphans(conn, leases_by_place)
