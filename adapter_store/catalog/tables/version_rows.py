"""The rows behind a name. Every function needs a write transaction, and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    delete,
    insert,
    select,
    update,
)

from adapter_store.catalog.tables import events, work_leases
from adapter_store.catalog.tables.filters import within
from adapter_store.catalog.tables.lookup import dump_files, dump_kinds, load_files, to_micros
from adapter_store.catalog.tables.schema import adapters, blobs, images, texts, versions
from adapter_store.core import MEMORY, AdapterEvent, BlobPlace, EventKind, SourceFile, Tenants
from adapter_store.errors import BlobLost
from contract.images.segment_kinds import SegmentKind
from servicekit.refs import AdapterName


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Content to be recorded under a name. `targets` are distinct module names, sorted, and
    `segment_kinds` its contents beside A and B.

    `texts` are the contents for the digests of tokenizer and chat template. An `ephemeral` one is
    in memory alone; it is deleted after `ttl`, 0 for never. `signed_by` is the trusted key that
    verified `signature`, "" for none.
    """

    name: AdapterName
    digest: str
    base_model: str
    source_uri: str
    rank: int
    targets: tuple[str, ...]
    source_bytes: int
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    description: str = ""
    created_by: str = ""
    source_revision: str = ""
    config_base_model: str = ""
    files: tuple[SourceFile, ...] = ()
    signed_by: str = ""
    signature: bytes = b""
    blob: BlobPlace = field(default_factory=BlobPlace)
    segment_kinds: tuple[SegmentKind, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    class_labels: tuple[str, ...] = ()
    ephemeral: bool = False
    ttl: timedelta = timedelta(0)
    texts: Mapping[str, bytes] = field(default_factory=dict)


def find_adapter(conn: Connection, name: AdapterName, tenants: Tenants = None) -> Row[Any] | None:
    query = select(adapters).where(
        adapters.c.tenant == name.tenant, adapters.c.name == name.name, within(tenants)
    )
    return conn.execute(query).first()


def get_adapter(conn: Connection, adapter_id: int) -> Row[Any]:
    return conn.execute(select(adapters).where(adapters.c.id == adapter_id)).one()


def add_adapter(conn: Connection, name: AdapterName, time: datetime) -> Row[Any]:
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
    adapter = find_adapter(conn, name)
    assert adapter is not None
    return adapter


def find_version(conn: Connection, adapter_id: int, version: int) -> Row[Any] | None:
    query = select(versions).where(
        versions.c.adapter_id == adapter_id, versions.c.version == version
    )
    return conn.execute(query).first()


def same_content(conn: Connection, adapter_id: int, new: NewVersion) -> Row[Any] | None:
    """Returns the newest live version of this content."""
    query = select(versions).where(
        versions.c.adapter_id == adapter_id,
        versions.c.digest == new.digest,
        versions.c.base_model == new.base_model,
        versions.c.tokenizer_digest == new.tokenizer_digest,
        versions.c.chat_template_digest == new.chat_template_digest,
        versions.c.class_labels == json.dumps(new.class_labels),
        versions.c.delete_time.is_(None),
    )
    return conn.execute(query.order_by(versions.c.version.desc())).first()


def live_versions(conn: Connection, adapter_id: int) -> dict[int, str]:
    query = select(versions.c.version, versions.c.digest).where(
        versions.c.adapter_id == adapter_id, versions.c.delete_time.is_(None)
    )
    return {row.version: row.digest for row in conn.execute(query)}


def superseded_versions(
    conn: Connection, adapter_id: int, current_version: int, keep: int, limit: int
) -> list[int]:
    """Returns the live versions beyond the newest `keep`, the oldest first, without the current one
    and pinned ones."""
    live = (versions.c.adapter_id == adapter_id, versions.c.delete_time.is_(None))
    newest_beyond = conn.scalar(
        select(versions.c.version)
        .where(*live)
        .order_by(versions.c.version.desc())
        .offset(keep)
        .limit(1)
    )
    if newest_beyond is None:
        return []
    query = select(versions.c.version).where(
        *live,
        versions.c.version <= newest_beyond,
        versions.c.version != current_version,
        versions.c.pinned.is_(False),
    )
    return list(conn.scalars(query.order_by(versions.c.version).limit(limit)))


def expired_versions(conn: Connection, time: datetime, limit: int) -> dict[int, list[int]]:
    """Returns live versions whose time to live has ended by now, without pinned ones, by their
    adapter's id."""
    return _live_numbers(
        conn,
        versions.c.expire_time <= to_micros(time),
        versions.c.pinned.is_(False),
        limit=limit,
    )


def versions_in_memory(conn: Connection) -> dict[int, list[int]]:
    """Returns live versions of blobs that are in memory, by their adapter's id."""
    return _live_numbers(conn, versions.c.digest.in_(_in_memory()))


def has_memory(conn: Connection) -> bool:
    """Returns whether there are blobs that are in memory."""
    return conn.execute(_in_memory().limit(1)).first() is not None


def forget_memory(conn: Connection) -> None:
    """Drops the blobs that are in memory, with all their versions, which are deleted."""
    for table in (versions, images, blobs):
        conn.execute(delete(table).where(table.c.digest.in_(_in_memory())))


def _in_memory() -> Select[Any]:
    return select(blobs.c.digest).where(blobs.c.place == MEMORY)


def _live_numbers(
    conn: Connection, *where: ColumnElement[bool], limit: int | None = None
) -> dict[int, list[int]]:
    query = select(versions.c.adapter_id, versions.c.version).where(
        versions.c.delete_time.is_(None), *where
    )
    found: dict[int, list[int]] = {}
    for row in conn.execute(query.limit(limit)):
        found.setdefault(row.adapter_id, []).append(row.version)
    return found


def delete_versions(
    conn: Connection, adapter_id: int, numbers: Sequence[int], time: datetime
) -> None:
    """Deletes versions, none of which is pinned. At most 1,000: the parameters of a statement are
    limited."""
    where = and_(versions.c.adapter_id == adapter_id, versions.c.version.in_(numbers))
    conn.execute(update(versions).where(where).values(delete_time=to_micros(time)))


def find_blob(conn: Connection, digest: str) -> BlobPlace | None:
    row = conn.execute(select(blobs).where(blobs.c.digest == digest)).first()
    return None if row is None else BlobPlace(row.place, load_files(row.files))


def put_blob(conn: Connection, new: NewVersion, time: datetime) -> None:
    """Records the stored files as the blob, unless there is one. Raises BlobLost."""
    blob = new.blob
    if blob.lease and not work_leases.release(conn, blob.lease, blob.owner):
        raise BlobLost(f"{new.digest}: storing it took longer than its lease lasted")
    known = find_blob(conn, new.digest)
    where = {"place": blob.place, "files": dump_files(blob.files)}
    if known is None:
        if blob.place not in ("", MEMORY) and not blob.lease:
            raise BlobLost(f"{new.digest} has been collected meanwhile")
        conn.execute(
            insert(blobs).values(
                digest=new.digest,
                rank=new.rank,
                targets=json.dumps(new.targets),
                source_bytes=new.source_bytes,
                create_time=to_micros(time),
                segment_kinds=dump_kinds(new.segment_kinds),
                invocation_tokens=json.dumps(new.invocation_tokens),
                **where,
            )
        )
    elif (blob.lease and known.place == blob.replaces) or (known.place == MEMORY != blob.place):
        conn.execute(update(blobs).where(blobs.c.digest == new.digest).values(**where))


def put_texts(conn: Connection, new: NewVersion) -> None:
    """Records the texts that are not known yet."""
    known = set(conn.scalars(select(texts.c.digest).where(texts.c.digest.in_(new.texts))))
    for digest, content in new.texts.items():
        if digest not in known:
            row = {"digest": digest, "content": content, "size_bytes": len(content)}
            conn.execute(insert(texts).values(row))


def add_version(
    conn: Connection, adapter_id: int, version: int, new: NewVersion, time: datetime
) -> None:
    conn.execute(
        insert(versions).values(
            adapter_id=adapter_id,
            version=version,
            digest=new.digest,
            base_model=new.base_model,
            source_uri=new.source_uri,
            labels=dump_labels(new.labels),
            pinned=False,
            create_time=to_micros(time),
            description=new.description,
            created_by=new.created_by,
            source_revision=new.source_revision,
            config_base_model=new.config_base_model,
            files=dump_files(new.files),
            signed_by=new.signed_by,
            signature=new.signature or None,
            tokenizer_digest=new.tokenizer_digest,
            chat_template_digest=new.chat_template_digest,
            class_labels=json.dumps(new.class_labels),
            ephemeral=new.ephemeral,
            expire_time=expire_micros(new, time),
        )
    )


def expire_micros(new: NewVersion, time: datetime) -> int | None:
    """Returns when a version that is registered now is deleted by itself; None for never."""
    return to_micros(time + new.ttl) if new.ttl else None


def change(conn: Connection, adapter_id: int, version: int, **values: object) -> None:
    where = and_(versions.c.adapter_id == adapter_id, versions.c.version == version)
    conn.execute(update(versions).where(where).values(**values))


def point(
    conn: Connection,
    adapter: Row[Any],
    version: int,
    digest: str,
    kind: EventKind,
    time: datetime,
) -> AdapterEvent:
    """Points the name to a version, and appends the event."""
    name = AdapterName(adapter.tenant, adapter.name)
    event = events.append(conn, kind, name, version, digest, time)
    conn.execute(
        update(adapters)
        .where(adapters.c.id == adapter.id)
        .values(
            current_version=version,
            last_version=max(adapter.last_version, version),
            revision=event.revision,
            update_time=to_micros(time),
        )
    )
    return event


def dump_labels(labels: dict[str, str]) -> str:
    return json.dumps(labels, sort_keys=True)
