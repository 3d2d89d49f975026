"""Changing what names point to. Every function needs an immediate transaction."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as insert_or_ignore

from adapter_store.catalog import events
from adapter_store.catalog.filters import within
from adapter_store.catalog.records import describe, to_micros
from adapter_store.catalog.schema import adapters, blobs, versions
from adapter_store.core import (
    AdapterEvent,
    AdapterName,
    AdapterRecord,
    AdapterRef,
    EventKind,
    Tenants,
)
from adapter_store.errors import Conflict, NotFound


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Content to be recorded under a name. `targets` are distinct module names, sorted."""

    name: AdapterName
    digest: str
    base_model: str
    source_uri: str
    rank: int
    targets: tuple[str, ...]
    source_bytes: int
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)


def register(
    conn: Connection, new: NewVersion, if_current_digest: str, time: datetime
) -> tuple[list[AdapterEvent], int]:
    """Points the name to this content; gives the events and the revision at which it is current.

    Content is a digest for a base model: a name's version of it never changes. The pin moves with
    the name. Labels replace the version's, unless none are given for content already recorded.
    Raises Conflict if the name does not point to `if_current_digest`.
    """
    adapter = _adapter(conn, new.name)
    current = _version(conn, adapter.id, adapter.current_version) if adapter else None
    _check_current(new.name, current, if_current_digest)
    if adapter is None:
        adapter = _add_adapter(conn, new.name, time)
    known = _same_content(conn, adapter.id, new)
    if current is not None and known is not None and current.version == known.version:
        return _register_again(conn, adapter, current, new, time)
    if known is None:
        version = adapter.last_version + 1
        _add_version(conn, adapter.id, version, new, time)
    else:
        version = known.version
        if new.labels:
            _set(conn, adapter.id, version, labels=_dump(new.labels))
    pinned = new.pinned or (current is not None and current.pinned)
    if current is not None:
        _set(conn, adapter.id, current.version, pinned=False)
    if pinned or known is None:
        _set(conn, adapter.id, version, pinned=pinned)
    kind = EventKind.REGISTERED if current is None else EventKind.UPDATED
    event = _point(conn, adapter, version, new.digest, kind, time)
    return [event], event.revision


def remove(
    conn: Connection, name: AdapterName, version: int, time: datetime, tenants: Tenants = None
) -> tuple[str, AdapterEvent]:
    """Deletes a version, or with 0 the whole name; gives the digest that it, or the name, had.

    A name that loses its current version points to its newest remaining one. Raises NotFound, also
    for a name of a tenant that is none of these.
    """
    adapter = _adapter(conn, name, tenants)
    live = _live_versions(conn, adapter.id) if adapter else {}
    if adapter is None or not live or (version and version not in live):
        what = describe(AdapterRef(name, version or None))
        raise NotFound(f"no adapter {what}", subject=what)
    leaving = [version] if version else list(live)
    for number in leaving:
        _set(conn, adapter.id, number, pinned=False, delete_time=to_micros(time))
    staying = {number: digest for number, digest in live.items() if number not in leaving}
    gone = live[version or adapter.current_version]
    if not staying:
        last = live[adapter.current_version]
        return gone, _point(conn, adapter, 0, last, EventKind.DELETED, time)
    current = adapter.current_version if adapter.current_version in staying else max(staying)
    return gone, _point(conn, adapter, current, staying[current], EventKind.UPDATED, time)


def set_pinned(
    conn: Connection, record: AdapterRecord, pinned: bool, time: datetime
) -> AdapterEvent | None:
    """Pins or unpins one version. None: it was so already."""
    if record.pinned == pinned:
        return None
    adapter = _adapter(conn, record.name)
    assert adapter is not None
    _set(conn, adapter.id, record.version, pinned=pinned)
    current = _version(conn, adapter.id, adapter.current_version)
    assert current is not None
    kind = EventKind.PINNED if pinned else EventKind.UNPINNED
    return _point(conn, adapter, current.version, current.digest, kind, time)


def _register_again(
    conn: Connection, adapter: Row[Any], current: Row[Any], new: NewVersion, time: datetime
) -> tuple[list[AdapterEvent], int]:
    """The name already points to this content: only labels and the pin can change."""
    changes: list[EventKind] = []
    labels = _dump(new.labels)
    if new.labels and labels != current.labels:
        _set(conn, adapter.id, current.version, labels=labels)
        changes.append(EventKind.UPDATED)
    if new.pinned and not current.pinned:
        _set(conn, adapter.id, current.version, pinned=True)
        changes.append(EventKind.PINNED)
    made = [_point(conn, adapter, current.version, new.digest, kind, time) for kind in changes]
    return made, made[-1].revision if made else adapter.revision


def _check_current(name: AdapterName, current: Row[Any] | None, required: str) -> None:
    if required and (current is None or current.digest != required):
        points_to = current.digest if current else "nothing"
        raise Conflict(
            f"if_current_digest: {name} points to {points_to}, not to {required}",
            subject="if_current_digest",
        )


def _adapter(conn: Connection, name: AdapterName, tenants: Tenants = None) -> Row[Any] | None:
    query = select(adapters).where(
        adapters.c.tenant == name.tenant, adapters.c.name == name.name, within(tenants)
    )
    return conn.execute(query).first()


def _add_adapter(conn: Connection, name: AdapterName, time: datetime) -> Row[Any]:
    conn.execute(
        insert(adapters).values(
            tenant=name.tenant,
            name=name.name,
            current_version=0,
            last_version=0,
            revision=0,
            update_time=to_micros(time),
        )
    )
    adapter = _adapter(conn, name)
    assert adapter is not None
    return adapter


def _version(conn: Connection, adapter_id: int, version: int) -> Row[Any] | None:
    query = select(versions).where(
        versions.c.adapter_id == adapter_id, versions.c.version == version
    )
    return conn.execute(query).first()


def _same_content(conn: Connection, adapter_id: int, new: NewVersion) -> Row[Any] | None:
    query = select(versions).where(
        versions.c.adapter_id == adapter_id,
        versions.c.digest == new.digest,
        versions.c.base_model == new.base_model,
        versions.c.delete_time.is_(None),
    )
    return conn.execute(query).first()


def _live_versions(conn: Connection, adapter_id: int) -> dict[int, str]:
    query = select(versions.c.version, versions.c.digest).where(
        versions.c.adapter_id == adapter_id, versions.c.delete_time.is_(None)
    )
    return {row.version: row.digest for row in conn.execute(query)}


def _add_version(
    conn: Connection, adapter_id: int, version: int, new: NewVersion, time: datetime
) -> None:
    conn.execute(
        insert_or_ignore(blobs)
        .values(
            digest=new.digest,
            rank=new.rank,
            targets=json.dumps(new.targets),
            source_bytes=new.source_bytes,
            create_time=to_micros(time),
        )
        .on_conflict_do_nothing()
    )
    conn.execute(
        insert(versions).values(
            adapter_id=adapter_id,
            version=version,
            digest=new.digest,
            base_model=new.base_model,
            source_uri=new.source_uri,
            labels=_dump(new.labels),
            pinned=False,
            create_time=to_micros(time),
        )
    )


def _set(conn: Connection, adapter_id: int, version: int, **values: object) -> None:
    where = and_(versions.c.adapter_id == adapter_id, versions.c.version == version)
    conn.execute(update(versions).where(where).values(**values))


def _point(
    conn: Connection,
    adapter: Row[Any],
    version: int,
    digest: str,
    kind: EventKind,
    time: datetime,
) -> AdapterEvent:
    """Lets the name point to a version, and writes the change down."""
    name = AdapterName(adapter.tenant, adapter.name)
    event = events.append(conn, kind, name, version, digest, time)
    conn.execute(
        update(adapters)
        .where(adapters.c.id == adapter.id)
        .values(
            current_version=version,
            last_version=func.max(adapters.c.last_version, version),
            revision=event.revision,
            update_time=to_micros(time),
        )
    )
    return event


def _dump(labels: dict[str, str]) -> str:
    return json.dumps(labels, sort_keys=True)
