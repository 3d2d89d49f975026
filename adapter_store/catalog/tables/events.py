"""The catalog's history: one revision per change, in commit order, without gaps."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select, update

from adapter_store.catalog.tables.lookup import from_micros, to_micros
from adapter_store.catalog.tables.schema import events, history
from adapter_store.core import AdapterEvent, EventKind
from adapter_store.errors import RevisionTooOld
from servicekit.refs import AdapterName

_REVISION = select(history.c.revision)


def revision(conn: Connection) -> int:
    """Returns the newest revision, 0 for an empty catalog."""
    return conn.execute(_REVISION).scalar_one()


def append(
    conn: Connection,
    kind: EventKind,
    name: AdapterName,
    version: int,
    digest: str,
    time: datetime,
) -> AdapterEvent:
    """Records a change under the next revision. Needs a write transaction."""
    event = AdapterEvent(revision(conn) + 1, kind, str(name), version, digest, time)
    conn.execute(update(history).values(revision=event.revision))
    conn.execute(
        insert(events).values(
            revision=event.revision,
            kind=kind.value,
            name=event.name,
            version=version,
            digest=digest,
            time=to_micros(time),
        )
    )
    return event


def forget_before(conn: Connection, oldest: int) -> None:
    """Drops events older than `oldest`, but never the newest."""
    conn.execute(delete(events).where(events.c.revision < min(oldest, revision(conn))))


def oldest(conn: Connection) -> int:
    """Returns the oldest revision that is kept; 1 if there is none."""
    return conn.scalar(select(func.min(events.c.revision))) or 1


def since(conn: Connection, since_revision: int, limit: int) -> list[AdapterEvent]:
    """Returns up to `limit` events after a revision.

    Raises RevisionTooOld if some of them are dropped, or if the revision is not of this history.
    """
    newest = revision(conn)
    if since_revision == newest:
        return []
    first = oldest(conn)
    if not first - 1 <= since_revision < newest:
        raise RevisionTooOld(
            f"since_revision: {since_revision} is not within {first - 1} to {newest}; list again",
            subject="since_revision",
        )
    query = (
        select(events)
        .where(events.c.revision > since_revision)
        .order_by(events.c.revision)
        .limit(limit)
    )
    return [
        AdapterEvent(
            row.revision,
            EventKind(row.kind),
            row.name,
            row.version,
            row.digest,
            from_micros(row.time),
        )
        for row in conn.execute(query)
    ]
