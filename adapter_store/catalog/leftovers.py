"""What no live record points to any more."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, exists, select

from adapter_store.catalog.records import to_micros
from adapter_store.catalog.schema import blobs, images, versions


def expire_versions(conn: Connection, deleted_before: datetime) -> int:
    """Drops the deleted versions whose grace is over; gives their number."""
    where = versions.c.delete_time <= to_micros(deleted_before)
    return conn.execute(delete(versions).where(where)).rowcount


def unreferenced(conn: Connection, limit: int) -> list[str]:
    """Digests of blobs that no version has."""
    query = select(blobs.c.digest).where(~exists().where(versions.c.digest == blobs.c.digest))
    return list(conn.scalars(query.limit(limit)))


def drop_blob(conn: Connection, digest: str) -> bool:
    """Drops the rows of an unreferenced blob. False: a version points to it again."""
    if conn.execute(select(versions.c.version).where(versions.c.digest == digest)).first():
        return False
    conn.execute(delete(images).where(images.c.digest == digest))
    conn.execute(delete(blobs).where(blobs.c.digest == digest))
    return True
