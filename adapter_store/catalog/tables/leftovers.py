"""Versions, blobs and texts that no live record points to any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, select, tuple_

from adapter_store.catalog.tables import work_leases
from adapter_store.catalog.tables.lookup import to_micros
from adapter_store.catalog.tables.schema import adapters, blobs, images, texts, versions

BATCH_DIGESTS = 1000
BATCH_ROWS = 1000
"""Rows that one transaction drops."""
BATCH_TEXTS = 100

BlobKey = tuple[str, str]
"""(digest, place)"""


def expire_versions(conn: Connection, deleted_before: datetime) -> int:
    """Drops the deleted versions whose grace is over, at most BATCH_ROWS; returns their number."""
    return _drop_versions(conn, versions.c.delete_time <= to_micros(deleted_before))


def expire_ephemeral(conn: Connection, deleted_before: datetime, tenant: str | None = None) -> int:
    """Drops deleted versions whose content is in memory, of this tenant or of all, at most
    BATCH_ROWS; returns their number."""
    where = [versions.c.ephemeral.is_(True), versions.c.delete_time <= to_micros(deleted_before)]
    if tenant is not None:
        own = select(adapters.c.id).where(adapters.c.tenant == tenant)
        where.append(versions.c.adapter_id.in_(own))
    return _drop_versions(conn, *where)


def _drop_versions(conn: Connection, *where: ColumnElement[bool]) -> int:
    key = (versions.c.adapter_id, versions.c.version)
    batch = select(*key).where(*where).limit(BATCH_ROWS)
    return conn.execute(delete(versions).where(tuple_(*key).in_(batch))).rowcount


def is_due(conn: Connection, now: datetime, deleted_before: datetime) -> bool:
    """Returns whether `changes.expire`, or `expire_ephemeral`, has something to do."""
    is_deleted = versions.c.delete_time.is_not(None)
    due = (
        and_(versions.c.expire_time <= to_micros(now), ~is_deleted, versions.c.pinned.is_(False)),
        and_(versions.c.ephemeral.is_(True), versions.c.delete_time <= to_micros(deleted_before)),
    )
    return any(
        conn.execute(select(versions.c.version).where(each).limit(1)).first() for each in due
    )


def forget_texts(conn: Connection) -> int:
    """Drops the tokenizers and chat templates that no version has, at most BATCH_TEXTS; returns
    their number."""
    uses = (versions.c.tokenizer_digest, versions.c.chat_template_digest)
    unused = [~exists().where(column == texts.c.digest) for column in uses]
    batch = select(texts.c.digest).where(*unused).limit(BATCH_TEXTS)
    return conn.execute(delete(texts).where(texts.c.digest.in_(batch))).rowcount


def unreferenced(conn: Connection, limit: int) -> list[str]:
    """Returns digests of blobs that no version has."""
    query = select(blobs.c.digest).where(~exists().where(versions.c.digest == blobs.c.digest))
    return list(conn.scalars(query.limit(limit)))


def take_blob(conn: Connection, digest: str) -> str | None:
    """Drops the rows of an unreferenced blob and returns its place, or None if a version points to
    the blob."""
    if conn.execute(select(versions.c.version).where(versions.c.digest == digest)).first():
        return None
    conn.execute(delete(images).where(images.c.digest == digest))
    place = conn.scalar(select(blobs.c.place).where(blobs.c.digest == digest))
    conn.execute(delete(blobs).where(blobs.c.digest == digest))
    return place or ""


def unknown(conn: Connection, digests: Sequence[str]) -> set[str]:
    """Returns the digests that no blob has. Queries in batches: the parameters of a statement are
    limited."""
    gone = set(digests)
    for start in range(0, len(digests), BATCH_DIGESTS):
        batch = blobs.c.digest.in_(digests[start : start + BATCH_DIGESTS])
        gone.difference_update(conn.scalars(select(blobs.c.digest).where(batch)))
    return gone


def orphans(conn: Connection, leases_by_place: Mapping[BlobKey, str]) -> set[BlobKey]:
    """Returns the places that no blob is at, and whose lease no replica holds."""
    digests = {digest for digest, _ in leases_by_place}
    query = select(blobs.c.digest, blobs.c.place).where(blobs.c.digest.in_(digests))
    known = {(row.digest, row.place) for row in conn.execute(query)}
    candidates = {key: lease for key, lease in leases_by_place.items() if key not in known}
    free = work_leases.end_expired(conn, list(candidates.values()))
    return {key for key, lease in candidates.items() if lease in free}
