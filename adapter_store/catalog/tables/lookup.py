"""Reads names: one adapter, a page of them, all versions, with verdicts. No statement runs per
row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, or_, select

from adapter_store.catalog.tables.filters import Filter, apply_filter, within
from adapter_store.catalog.tables.schema import (
    adapters,
    announcements,
    blobs,
    images,
    layout_bases,
    layouts,
    texts,
    versions,
)
from adapter_store.core import (
    AdapterRecord,
    ImageContent,
    ImageState,
    LayoutVerdict,
    Part,
    ServerLimits,
    SourceFile,
    Tenants,
)
from contract.images.segment_kinds import SegmentKind
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef


@dataclass(frozen=True, slots=True)
class VersionsPage:
    """A page of a name's versions. `next_page_token` is "" for the last page, `current_version` 0
    for a deleted name."""

    records: list[AdapterRecord]
    next_page_token: str
    current_version: int
    revision: int


MIN_HIDDEN_MICROS = 50_000
"""The shortest build that a new record of known content is shown to take. About as long as it takes
until a worker finds that new content is incompatible."""
LASTS_FOR = timedelta(hours=1)
"""How long an announcement lasts without being renewed: a server may be away for a while."""
PRESENT_FOR = timedelta(minutes=2)
"""How long its servers count as there without renewing it: three renewals, also if the replica that
is asked has a clock ahead of theirs by MAX_SKEW_MICROS."""
MAX_SKEW_MICROS = 60_000_000
"""By how much replicas' clocks may differ. A record that seems to come from further ahead was made
before the clock was set back."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def present_after(now: int) -> int:
    """Returns the earliest end, in microseconds as `now`, of announcements whose servers are
    there."""
    return now + (LASTS_FOR - PRESENT_FOR) // _MICROSECOND


def find(conn: Connection, ref: AdapterRef, tenants: Tenants = None) -> AdapterRecord:
    """Returns the record of these tenants that a reference means. Raises NotFound, for a deleted
    record and for another tenant's alike.

    A digest means its first current record by tenant and name, else any older one.
    """
    row = (
        _find_named(conn, ref, ref.name, tenants) if ref.name else _find_digest(conn, ref, tenants)
    )
    if row is None:
        raise NotFound(f"no adapter {ref}", subject=str(ref))
    return _to_records(conn, [row])[0]


def _find_named(
    conn: Connection, ref: AdapterRef, name: AdapterName, tenants: Tenants
) -> Row[Any] | None:
    if tenants is not None and name.tenant not in tenants:
        return None
    values = {"of_tenant": name.tenant, "of_name": name.name}
    if ref.version:
        return conn.execute(_VERSION, values | {"of_version": ref.version}).first()
    return conn.execute(_CURRENT, values).first()


def _find_digest(conn: Connection, ref: AdapterRef, tenants: Tenants) -> Row[Any] | None:
    query = (
        _record_query()
        .where(
            versions.c.delete_time.is_(None),
            within(tenants),
            versions.c.digest == ref.digest,
        )
        .order_by(
            versions.c.version != adapters.c.current_version,
            adapters.c.tenant,
            adapters.c.name,
            versions.c.version.desc(),
        )
    )
    return conn.execute(query.limit(1)).first()


def page(
    conn: Connection, terms: Filter, after: AdapterName | None, limit: int, tenants: Tenants
) -> list[AdapterRecord]:
    """Returns current versions in order of tenant and name, from the first after `after`."""
    query = _record_query().where(
        adapters.c.current_version > 0,
        versions.c.version == adapters.c.current_version,
        within(tenants),
    )
    rows = conn.execute(apply_filter(query, terms, after, conn.dialect.name).limit(limit)).all()
    return _to_records(conn, rows)


def versions_page(
    conn: Connection,
    name: AdapterName,
    before_version: int | None,
    limit: int,
    deleted_after: datetime,
    tenants: Tenants,
) -> list[AdapterRecord]:
    """Returns a name's versions, newest first, with those deleted after `deleted_after`."""
    query = (
        _record_query()
        .where(
            adapters.c.tenant == name.tenant,
            adapters.c.name == name.name,
            within(tenants),
            or_(
                versions.c.delete_time.is_(None),
                versions.c.delete_time > to_micros(deleted_after),
            ),
        )
        .order_by(versions.c.version.desc())
    )
    if before_version is not None:
        query = query.where(versions.c.version < before_version)
    return _to_records(conn, conn.execute(query.limit(limit)).all())


def current_version(conn: Connection, name: AdapterName, tenants: Tenants) -> int:
    """Returns the version that the name points to; 0 if it is deleted, or another tenant's."""
    query = select(adapters.c.current_version).where(
        adapters.c.tenant == name.tenant, adapters.c.name == name.name, within(tenants)
    )
    return conn.scalar(query) or 0


def text(conn: Connection, digest: str, deleted_after: datetime, tenants: Tenants) -> bytes | None:
    """Returns a tokenizer's extract or a chat template of a record of these tenants, live or
    deleted after this time; None if there is none."""
    query = (
        select(texts.c.content)
        .join(
            versions,
            or_(
                versions.c.tokenizer_digest == texts.c.digest,
                versions.c.chat_template_digest == texts.c.digest,
            ),
        )
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .where(
            texts.c.digest == digest,
            or_(
                versions.c.delete_time.is_(None), versions.c.delete_time > to_micros(deleted_after)
            ),
            within(tenants),
        )
    )
    return conn.scalar(query.limit(1))


def dump_files(files: Sequence[SourceFile]) -> str:
    rows = [[file.name, file.size_bytes, file.sha256] for file in files]
    return json.dumps(rows, separators=(",", ":"))


def load_files(text: str) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(*row) for row in json.loads(text))


def dump_kinds(kinds: Iterable[SegmentKind]) -> str:
    return json.dumps(sorted({kind.value for kind in kinds}))


def load_kinds(text: str) -> tuple[SegmentKind, ...]:
    return tuple(map(SegmentKind, json.loads(text)))


def _record_query() -> Select[Any]:
    return (
        select(
            adapters.c.tenant,
            adapters.c.name,
            adapters.c.update_time,
            versions.c.version,
            versions.c.digest,
            versions.c.base_model,
            versions.c.source_uri,
            versions.c.labels,
            versions.c.pinned,
            versions.c.create_time,
            versions.c.delete_time,
            versions.c.description,
            versions.c.created_by,
            versions.c.source_revision,
            versions.c.config_base_model,
            versions.c.files,
            versions.c.signed_by,
            versions.c.signature,
            versions.c.tokenizer_digest,
            versions.c.chat_template_digest,
            versions.c.class_labels,
            versions.c.ephemeral,
            versions.c.expire_time,
            blobs.c.rank,
            blobs.c.targets,
            blobs.c.source_bytes,
            blobs.c.segment_kinds,
            blobs.c.invocation_tokens,
        )
        .join(versions, versions.c.adapter_id == adapters.c.id)
        .join(blobs, blobs.c.digest == versions.c.digest)
    )


# Each request for an adapter that a server does not know needs these: they are put together once,
# which takes as long as running them.
_NAMED = _record_query().where(
    versions.c.delete_time.is_(None),
    adapters.c.tenant == bindparam("of_tenant"),
    adapters.c.name == bindparam("of_name"),
)
_CURRENT = _NAMED.where(versions.c.version == adapters.c.current_version)
_VERSION = _NAMED.where(versions.c.version == bindparam("of_version"))
_LAYOUTS = (
    select(layout_bases)
    .where(layout_bases.c.base_model.in_(bindparam("of_bases", expanding=True)))
    .order_by(layout_bases.c.layout_id)
)
_SERVERS = (
    select(announcements, layouts.c.last_use_time)
    .join(layouts, layouts.c.layout_id == announcements.c.layout_id)
    .where(announcements.c.layout_id.in_(bindparam("of_layouts", expanding=True)))
    .order_by(announcements.c.max_rank, announcements.c.announcement_id)
)
_VERDICTS = select(images).where(images.c.digest.in_(bindparam("of_digests", expanding=True)))


def _to_records(conn: Connection, rows: Sequence[Row[Any]]) -> list[AdapterRecord]:
    layouts_by_base = _layouts_by_base(conn, {row.base_model for row in rows})
    verdicts = _verdicts(conn, {row.digest for row in rows}) if layouts_by_base else {}
    layout_ids = {each for found in layouts_by_base.values() for each in found}
    found_servers = servers(conn, layout_ids) if layout_ids else {}
    return [
        AdapterRecord(
            name=AdapterName(row.tenant, row.name),
            version=row.version,
            digest=row.digest,
            source_uri=row.source_uri,
            base_model=row.base_model,
            rank=row.rank,
            targets=tuple(json.loads(row.targets)),
            source_bytes=row.source_bytes,
            create_time=from_micros(row.create_time),
            update_time=from_micros(row.update_time),
            pinned=row.pinned,
            labels=json.loads(row.labels),
            verdicts=tuple(
                replace(
                    verdicts.get((row.digest, layout_id))
                    or LayoutVerdict(layout_id, ImageState.PENDING),
                    servers=tuple(
                        each
                        for each in found_servers.get(layout_id, ())
                        if each.serve(row.base_model)
                    ),
                )
                for layout_id in layouts_by_base.get(row.base_model, ())
            ),
            description=row.description,
            created_by=row.created_by,
            source_revision=row.source_revision,
            config_base_model=row.config_base_model,
            files=load_files(row.files),
            signed_by=row.signed_by,
            signature=row.signature or b"",
            delete_time=None if row.delete_time is None else from_micros(row.delete_time),
            segment_kinds=load_kinds(row.segment_kinds),
            invocation_tokens=tuple(json.loads(row.invocation_tokens)),
            tokenizer_digest=row.tokenizer_digest,
            chat_template_digest=row.chat_template_digest,
            class_labels=tuple(json.loads(row.class_labels)),
            ephemeral=row.ephemeral,
            expire_time=None if row.expire_time is None else from_micros(row.expire_time),
        )
        for row in rows
    ]


def _layouts_by_base(conn: Connection, base_models: Iterable[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for row in conn.execute(_LAYOUTS, {"of_bases": list(base_models)}):
        result.setdefault(row.base_model, []).append(row.layout_id)
    return result


def servers(conn: Connection, layout_ids: Iterable[str]) -> dict[str, list[ServerLimits]]:
    """Returns the limits of the servers of each of these layouts, the lowest ranks first, including
    gone ones; see present."""
    result: dict[str, list[ServerLimits]] = {}
    for row in conn.execute(_SERVERS, {"of_layouts": list(layout_ids)}):
        limits = ServerLimits(
            row.announcement_id,
            row.max_rank,
            row.expire_time,
            is_renewed=row.is_renewed,
            last_use_time=row.last_use_time,
            names=frozenset(names_of(row) if row.base_model else ()),
            segment_kinds=load_kinds(row.segment_kinds),
            lora_targets=tuple(json.loads(row.lora_targets)),
            max_added_tokens=row.max_added_tokens,
            applies_invocation_tokens=row.applies_invocation_tokens,
            weight_form=row.weight_form,
            part=Part(row.num_ranks, row.rank_index, row.first_announcement_id),
        )
        result.setdefault(row.layout_id, []).append(limits)
    return result


def names_of(announcement: Row[Any]) -> list[str]:
    """Returns the names that an announcement has of the base model."""
    return [*filter(None, [announcement.base_model]), *json.loads(announcement.aliases)]


def _verdicts(conn: Connection, digests: Iterable[str]) -> dict[tuple[str, str], LayoutVerdict]:
    rows = conn.execute(_VERDICTS, {"of_digests": list(digests)})
    return {(row.digest, row.layout_id): to_verdict(row) for row in rows}


def to_verdict(row: Row[Any]) -> LayoutVerdict:
    state = ImageState(row.state)
    return LayoutVerdict(
        row.layout_id,
        state,
        row.reason,
        row.image_bytes,
        row.build_micros,
        row.build_time,
        retry_micros=row.retry_micros,
        fits=state is not ImageState.INCOMPATIBLE,
        content=None if row.content is None else _load_content(row.content),
    )


def verdict_at(now: int, verdict: LayoutVerdict) -> LayoutVerdict:
    """Returns the verdict at this time, in microseconds: after a while a failed build is PENDING
    again."""
    retry_time = verdict.build_time + verdict.build_micros + verdict.retry_micros
    may_retry = verdict.state is ImageState.INCOMPATIBLE and verdict.retry_micros > 0
    if may_retry and now >= retry_time:
        return LayoutVerdict(verdict.layout_id, ImageState.PENDING)
    return verdict


def dump_content(content: ImageContent) -> str:
    kinds = [kind.value for kind in content.segment_kinds]
    parts = [content.modules, kinds, *content[2:]]
    return json.dumps(parts, separators=(",", ":"))


def _load_content(text: str) -> ImageContent:
    modules, kinds, *more = json.loads(text)
    found = ImageContent(tuple(modules), tuple(map(SegmentKind, kinds)))
    read: dict[str, Callable[[Any], Any]] = {
        "names": lambda names: tuple(map(tuple, names)),
        "added_tokens": int,
        "unused_spaces": tuple,
        "uneven_experts": tuple,
        "shared_biases": tuple,
    }  # earlier releases recorded none, or the first of them
    later = zip(read.items(), more, strict=False)
    return found._replace(**{name: parse(value) for (name, parse), value in later})


def hidden_micros(create_time: int, verdict: LayoutVerdict, now: int) -> int:
    """Returns for how long a record of this time does not show the verdict: until the image could
    have been built for it. Else a tenant could tell that others have registered it before.

    All times are in microseconds. A clock that was set back makes no record young again.
    """
    age = now - create_time
    is_older = create_time < verdict.build_time or age < -MAX_SKEW_MICROS
    is_unknown = verdict.state is ImageState.PENDING and not verdict.fits
    if is_unknown or is_older:
        return 0
    build_micros = 0 if verdict.state is ImageState.COMPILING else verdict.build_micros
    lasts = max(MIN_HIDDEN_MICROS, build_micros)
    return max(0, lasts - max(0, age))


def shown(record: AdapterRecord, now: int, live_since: int) -> AdapterRecord:
    """Returns the record as it is at this time, in microseconds: without the servers that are gone,
    and with those verdicts as PENDING that it does not show yet, or not any more. Layouts used
    since `live_since` are live."""
    create_time = to_micros(record.create_time)
    verdicts = []
    for each in record.verdicts:
        verdict = verdict_at(now, each)
        if hidden_micros(create_time, each, now) > 0:
            is_built = each.state is not ImageState.PENDING
            verdict = LayoutVerdict(each.layout_id, ImageState.PENDING, is_hidden=is_built)
        verdicts.append(replace(verdict, servers=present(each.servers, now, live_since)))
    return replace(record, verdicts=tuple(verdicts))


def present(servers: Sequence[ServerLimits], now: int, live_since: int) -> tuple[ServerLimits, ...]:
    """Returns a layout's servers that are there at this time, in microseconds.

    Servers that renew nothing have been replaced if others renewed after they registered. Else they
    may be there if their layout is used.
    """
    earliest_end = present_after(now)
    renewed = [each for each in servers if each.is_renewed]
    found = tuple(each for each in renewed if each.expire_time > earliest_end)
    if found:
        return found
    last_end = max((each.expire_time for each in renewed), default=0)
    others = (each for each in servers if not each.is_renewed and each.expire_time > last_end)
    return tuple(each for each in others if each.last_use_time >= live_since)
