"""The state of the image of each (digest, layout), and who may pull it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
)

from adapter_store.catalog.database import now_micros, upsert
from adapter_store.catalog.tables.layouts import is_live
from adapter_store.catalog.tables.lookup import (
    dump_content,
    hidden_micros,
    to_micros,
    to_verdict,
    verdict_at,
)
from adapter_store.catalog.tables.schema import (
    adapters,
    blobs,
    images,
    layout_bases,
    layouts,
    leases,
    versions,
)
from adapter_store.core import ImageContent, ImageKey, ImageState, LayoutVerdict, Tenants
from adapter_store.errors import LimitExceeded

_FINAL = (ImageState.READY.value, ImageState.INCOMPATIBLE.value)


@dataclass(frozen=True, slots=True)
class ImageAccess:
    """The facts that decide whether an image may be pulled: a record of its digest exists, live or
    deleted within the grace; one such record is for a base model of its layout; and its verdict,
    which may be shown in `hidden_s`."""

    has_record: bool
    serves_base: bool
    verdict: LayoutVerdict
    hidden_s: float = 0.0


def image_access(
    conn: Connection, key: ImageKey, deleted_after: datetime, tenants: Tenants, now: datetime
) -> ImageAccess:
    """Returns the facts that decide whether these tenants may pull an image now."""
    found = verdict_at(to_micros(now), verdict(conn, key))
    serves_base = has_record(conn, key.digest, deleted_after, tenants, key.layout_id)
    is_known = serves_base or has_record(conn, key.digest, deleted_after, tenants)
    return ImageAccess(
        is_known,
        serves_base,
        found,
        _hidden_seconds(conn, key, found, tenants, now) if is_known else 0.0,
    )


def _hidden_seconds(
    conn: Connection, key: ImageKey, verdict: LayoutVerdict, tenants: Tenants, now: datetime
) -> float:
    """Returns for how long the oldest record of these tenants does not show the verdict."""
    if tenants is None or verdict.state is ImageState.PENDING:
        return 0.0
    parameters = {"of_digest": key.digest, "of_tenants": sorted(tenants)}
    oldest = conn.scalar(_OLDEST_OF_TENANTS, parameters) or 0
    return hidden_micros(oldest, verdict, to_micros(now)) / 1_000_000


def verdict(conn: Connection, key: ImageKey) -> LayoutVerdict:
    parameters = {"of_digest": key.digest, "of_layout": key.layout_id}
    row = conn.execute(_VERDICT, parameters).first()
    if row is None:
        return LayoutVerdict(key.layout_id, ImageState.PENDING)
    return to_verdict(row)


def set_verdict(conn: Connection, digest: str, verdict: LayoutVerdict, now: datetime) -> bool:
    """Records the state of an image. Returns False if its blob has been collected meanwhile, or its
    layout forgotten."""
    if not _is_known(conn, ImageKey(digest, verdict.layout_id)):
        return False
    values: dict[str, str | int] = {
        "state": verdict.state.value,
        "reason": verdict.reason,
        "image_bytes": verdict.image_bytes,
        "retry_micros": verdict.retry_micros,
    }
    if verdict.content is not None:
        values["content"] = dump_content(verdict.content)
    if verdict.build_micros:
        values["build_micros"] = verdict.build_micros
    compiling = ImageState.COMPILING
    key = ImageKey(digest, verdict.layout_id)
    before = conn.scalar(select(images.c.state).where(_is(key)))
    is_end = verdict.build_micros > 0 and before != compiling.value
    # Else it was recorded when the build began, or nothing was built: the last build counts.
    if before is None or verdict.state is compiling or is_end:
        values["build_time"] = to_micros(now) - verdict.build_micros
    conn.execute(
        upsert(conn, images)
        .values(digest=digest, layout_id=verdict.layout_id, **values)
        .on_conflict_do_update(index_elements=["digest", "layout_id"], set_=values)
    )
    return True


def set_fits(
    conn: Connection, key: ImageKey, build_micros: int, content: ImageContent, now: datetime
) -> None:
    """Records that the adapter fits the layout, and the changes of its image, unless more is known
    of it."""
    if not _is_known(conn, key):
        return
    values = {
        "state": ImageState.PENDING.value,
        "reason": "",
        "image_bytes": 0,
        "build_micros": build_micros,
        "build_time": to_micros(now) - build_micros,
        "content": dump_content(content),
    }
    conn.execute(
        upsert(conn, images)
        .values(digest=key.digest, layout_id=key.layout_id, **values)
        .on_conflict_do_update(
            index_elements=["digest", "layout_id"],
            set_={"content": values["content"]},
            where=images.c.content.is_(None),
        )
    )


def unfinished(conn: Connection, layout_id: str, after_digest: str, limit: int) -> list[str]:
    """Returns the digests of current versions that have no final verdict under this layout."""
    query = (
        _current_digests()
        .join(
            layout_bases,
            and_(
                layout_bases.c.base_model == versions.c.base_model,
                layout_bases.c.layout_id == layout_id,
            ),
        )
        .outerjoin(
            images,
            and_(images.c.digest == versions.c.digest, images.c.layout_id == layout_id),
        )
        .where(
            versions.c.digest > after_digest,
            or_(images.c.state.is_(None), images.c.state.not_in(_FINAL)),
        )
        .order_by(versions.c.digest)
        .limit(limit)
    )
    return list(conn.scalars(query))


def pinned_keys(conn: Connection, live_since: int) -> list[ImageKey]:
    """Returns every image of every pinned version, for live layouts."""
    query = (
        select(versions.c.digest, layout_bases.c.layout_id)
        .distinct()
        .join(layout_bases, layout_bases.c.base_model == versions.c.base_model)
        .join(layouts, layouts.c.layout_id == layout_bases.c.layout_id)
        .where(versions.c.pinned.is_(True), is_live(live_since))
    )
    return [ImageKey(row.digest, row.layout_id) for row in conn.execute(query)]


def check_pinned_bytes(conn: Connection, max_bytes: int) -> None:
    """Raises LimitExceeded if the compiled pinned images have more bytes than this."""
    pinned = select(versions.c.digest).where(versions.c.pinned.is_(True))
    query = select(func.sum(images.c.image_bytes)).where(images.c.digest.in_(pinned))
    num_bytes = int(conn.scalar(query) or 0)
    if num_bytes > max_bytes:
        raise LimitExceeded(
            f"ref: the pinned images would take {num_bytes} of {max_bytes} bytes of memory",
            subject="ref",
            reason="PINNED_BYTES",
        )


def has_record(
    conn: Connection,
    digest: str,
    deleted_after: datetime,
    tenants: Tenants = None,
    layout_id: str = "",
) -> bool:
    """Returns whether a record of these tenants, live or deleted after this time, has this digest;
    with a layout, whether such a record is for its base model."""
    query = _RECORDS[tenants is not None, bool(layout_id)]
    parameters = {
        "of_digest": digest,
        "deleted_after": to_micros(deleted_after),
        "of_tenants": sorted(tenants or ()),
        "of_layout": layout_id,
    }
    return conn.execute(query, parameters).first() is not None


def forget_compiling(conn: Connection) -> None:
    """Resets the images that were being compiled when a process ended to pending, except images
    that another replica compiles now, and has a lease for."""
    lease = literal("image:") + images.c.digest + ":" + images.c.layout_id
    alive = exists().where(leases.c.key == lease, leases.c.expire_time > now_micros(conn))
    is_compiling = images.c.state == ImageState.COMPILING.value
    conn.execute(delete(images).where(is_compiling, ~alive))


def forget_all(conn: Connection) -> None:
    """Forgets all verdicts, which hold for one compiler only."""
    conn.execute(delete(images))


def _current_digests() -> Select[tuple[str]]:
    return (
        select(versions.c.digest)
        .distinct()
        .join(
            adapters,
            and_(
                adapters.c.id == versions.c.adapter_id,
                adapters.c.current_version == versions.c.version,
            ),
        )
    )


def _is_known(conn: Connection, key: ImageKey) -> bool:
    known = select(blobs.c.digest).where(
        blobs.c.digest == key.digest, exists().where(layouts.c.layout_id == key.layout_id)
    )
    return conn.execute(known).first() is not None


# Made once: it takes longer to make such a query than to run it, and each pull waits for these.
_OF_TENANTS = adapters.c.tenant.in_(bindparam("of_tenants", expanding=True))
_VERDICT = select(images).where(
    images.c.digest == bindparam("of_digest"), images.c.layout_id == bindparam("of_layout")
)
_OLDEST_OF_TENANTS = (
    select(func.min(versions.c.create_time))
    .join(adapters, adapters.c.id == versions.c.adapter_id)
    .where(versions.c.digest == bindparam("of_digest"), _OF_TENANTS)
)
_RECORD = (
    select(versions.c.version)
    .join(adapters, adapters.c.id == versions.c.adapter_id)
    .where(
        versions.c.digest == bindparam("of_digest"),
        or_(versions.c.delete_time.is_(None), versions.c.delete_time > bindparam("deleted_after")),
    )
    .limit(1)
)
_RECORD_FOR_LAYOUT = _RECORD.join(
    layout_bases, layout_bases.c.base_model == versions.c.base_model
).where(layout_bases.c.layout_id == bindparam("of_layout"))
_RECORDS = {
    (False, False): _RECORD,
    (False, True): _RECORD_FOR_LAYOUT,
    (True, False): _RECORD.where(_OF_TENANTS),
    (True, True): _RECORD_FOR_LAYOUT.where(_OF_TENANTS),
}
"""A record with a digest: of some tenants, or of any; for a layout, or for any."""


def _is(key: ImageKey) -> Any:
    return and_(images.c.digest == key.digest, images.c.layout_id == key.layout_id)
