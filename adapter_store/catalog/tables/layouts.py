"""Layouts, and which of them are live: a server has recently registered or pulled for them.

Of live ones an account may have a share. Unused ones stay for a while: a server that comes back
after a pause continues with them. Then they are forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    exists,
    func,
    insert,
    select,
    tuple_,
    update,
)

from adapter_store.catalog.tables.lookup import from_micros, present, servers, to_micros
from adapter_store.catalog.tables.schema import (
    announcements,
    images,
    layout_bases,
    layouts,
    versions,
)
from adapter_store.core import ImageState, LayoutInfo
from adapter_store.errors import LimitExceeded
from servicekit.errors import NotFound
from servicekit.shares import limit_of

logger = logging.getLogger(__name__)

MAX_FORGOTTEN = 100
"""How many layouts are forgotten in one transaction."""
USE_PRECISION = timedelta(hours=1)
"""A use within this time of the last recorded one is not recorded."""
MAX_RESET = 1000
"""How many images are reset in one transaction."""
MAX_SHOWN_NAMES = 16
"""How many aliases of a layout, and how many of its base models but for the first, are listed."""
FORGET_AFTER_TTLS = 4
"""A layout that was not used for so many times its time to live may be forgotten. A server
registers its layout whenever it connects."""


@dataclass(frozen=True, slots=True)
class LayoutLimits:
    """How many layouts may be live: of one base model, and in all. Of both an account may register
    `share` of the number that others leave free."""

    max_per_base: int = 1 << 30
    max_in_all: int = 1 << 30
    share: float = 1.0


def precision(ttl: timedelta) -> timedelta:
    """Returns how exactly the last use is known: to the hour, or to a tenth of a short `ttl`."""
    return min(USE_PRECISION, ttl / 10) if ttl else USE_PRECISION


def live_since(time: datetime, ttl: timedelta, num_ttls: int = 1) -> int:
    """Returns the earliest last use, in microseconds, of a layout used within so many times the
    `ttl`; 0 without one."""
    return max(0, to_micros(time) - num_ttls * (ttl // timedelta(microseconds=1))) if ttl else 0


def is_live(since: int) -> ColumnElement[bool]:
    return layouts.c.last_use_time >= since


def add(
    conn: Connection,
    layout_id: str,
    base_model: str,
    body: str,
    time: datetime,
    ttl: timedelta,
    account: str,
    limits: LayoutLimits,
) -> bool:
    """Records a layout for its base model, or its use. Returns False if it was live.

    Raises LimitExceeded for a layout that was not live, if there are too many live layouts, of one
    of its base models or in all, or the account has its share of them.
    """
    now, since = to_micros(time), live_since(time, ttl)
    last_use = _last_use(conn, layout_id)
    if last_use is not None:
        if last_use < since:
            _check_limits(conn, bases(conn, layout_id), since, account, limits)
            _change(conn, layout_id, last_use_time=now, registered_by=account)
            return True
        _note_use(conn, layout_id, last_use, now, ttl)
        return False
    _check_limits(conn, [base_model], since, account, limits)
    conn.execute(
        insert(layouts).values(
            layout_id=layout_id,
            body=body,
            create_time=now,
            last_use_time=now,
            registered_by=account,
        )
    )
    conn.execute(insert(layout_bases).values(base_model=base_model, layout_id=layout_id))
    return True


def _check_limits(
    conn: Connection, base_models: Sequence[str], since: int, account: str, limits: LayoutLimits
) -> None:
    """Raises LimitExceeded if the account may have no further live layout of these base models."""
    registrant = layouts.c.registered_by
    query = select(registrant, func.count()).where(is_live(since)).group_by(registrant)
    in_all = {row[0]: row[1] for row in conn.execute(query)}
    _check_limit(in_all, account, limits.max_in_all, limits.share, "all base models together")
    of_bases = (
        select(layout_bases.c.base_model, registrant, func.count())
        .join(layouts, layouts.c.layout_id == layout_bases.c.layout_id)
        .where(layout_bases.c.base_model.in_(base_models), is_live(since))
        .group_by(layout_bases.c.base_model, registrant)
    )
    counts: dict[str, dict[str, int]] = {}
    for base_model, name, count in conn.execute(of_bases):
        counts.setdefault(base_model, {})[name] = count
    for base_model, by_account in counts.items():
        of = repr(base_model)
        _check_limit(by_account, account, limits.max_per_base, limits.share, of, "max-layouts")


def _check_limit(
    by_account: dict[str, int],
    account: str,
    most: int,
    share: float,
    of: str,
    setting: str = "max-layouts-in-all",
) -> None:
    own = by_account.get(account, 0)
    others = sum(by_account.values()) - own
    if own >= limit_of(most, others, share) or own + others >= most:
        raise LimitExceeded(
            f"layout.base_model: {own} layouts in use for {of} are registered by "
            f"{account or 'all callers together'}, {others} by others, and at most {most} are "
            f"allowed (setting {setting}); one tenant may use at most {share:.0%} of the number "
            "that others leave free. Unused layouts expire after --layout-ttl-seconds",
            subject="layout.base_model",
            reason="LAYOUT_LIMIT",
        )


def use(
    conn: Connection, layout_id: str, time: datetime, ttl: timedelta, limits: LayoutLimits
) -> bool:
    """Records the use of a layout, unless a recent one is recorded. Returns whether it is live
    again. It stays unused if who registered it may have no further live layout, or it has been
    forgotten."""
    now, since = to_micros(time), live_since(time, ttl)
    last_use = _last_use(conn, layout_id)
    if last_use is None:
        return False
    if last_use >= since:
        _note_use(conn, layout_id, last_use, now, ttl)
        return False
    registrant = select(layouts.c.registered_by).where(layouts.c.layout_id == layout_id)
    account = conn.execute(registrant).scalar_one()
    try:
        _check_limits(conn, bases(conn, layout_id), since, account, limits)
    except LimitExceeded as error:
        logger.warning("a layout stays unused", extra={"why": error.message})
        return False
    _change(conn, layout_id, last_use_time=now)
    return True


def _last_use(conn: Connection, layout_id: str) -> int | None:
    """Returns the last use of a layout; None for an unknown one."""
    query = select(layouts.c.last_use_time).where(layouts.c.layout_id == layout_id)
    return conn.execute(query).scalar_one_or_none()


def _note_use(conn: Connection, layout_id: str, last_use: int, now: int, ttl: timedelta) -> None:
    if now - last_use >= precision(ttl) // timedelta(microseconds=1):
        _change(conn, layout_id, last_use_time=now)


def _change(conn: Connection, layout_id: str, **values: object) -> None:
    conn.execute(update(layouts).where(layouts.c.layout_id == layout_id).values(**values))


def bases(conn: Connection, layout_id: str) -> list[str]:
    """Returns the names of a layout's base model, in order; none for an unknown one."""
    query = select(layout_bases.c.base_model).where(layout_bases.c.layout_id == layout_id)
    return list(conn.scalars(query.order_by(layout_bases.c.base_model)))


def body(conn: Connection, layout_id: str) -> str | None:
    return conn.scalar(select(layouts.c.body).where(layouts.c.layout_id == layout_id))


def live(conn: Connection, since: int, *where: ColumnElement[bool]) -> list[str]:
    return list(conn.scalars(select(layouts.c.layout_id).where(is_live(since), *where)))


def unused(conn: Connection, since: int) -> frozenset[str]:
    """Returns the layouts that are not live."""
    return frozenset(conn.scalars(select(layouts.c.layout_id).where(~is_live(since))))


def forget_unused_images(conn: Connection, since: int) -> int:
    """Resets the images of unused layouts to pending, at most MAX_RESET; returns their number.
    INCOMPATIBLE verdicts stay."""
    gone = select(layouts.c.layout_id).where(~is_live(since))
    where = (images.c.state != ImageState.INCOMPATIBLE.value, images.c.layout_id.in_(gone))
    key = (images.c.digest, images.c.layout_id)
    batch = select(*key).where(*where).limit(MAX_RESET)
    return conn.execute(delete(images).where(tuple_(*key).in_(batch))).rowcount


def _names_of(conn: Connection, layout_ids: Sequence[str]) -> dict[str, list[str]]:
    """Returns the names of each layout's base model: the first base model, then other names."""
    names: dict[str, list[str]] = {}
    of_layouts = select(layout_bases).where(layout_bases.c.layout_id.in_(layout_ids))
    order = (layout_bases.c.is_alias, layout_bases.c.base_model)
    for row in conn.execute(of_layouts.order_by(*order)):
        names.setdefault(row.layout_id, []).append(row.base_model)
    return names


def _announced_as(conn: Connection, layout_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Returns the layouts with the names by which servers announced their base models."""
    announced = select(announcements.c.layout_id, announcements.c.base_model)
    of_servers = announced.where(announcements.c.layout_id.in_(layout_ids))
    return {(row.layout_id, row.base_model) for row in conn.execute(of_servers)}


def page(
    conn: Connection, after: str, limit: int, time: datetime, live_since: int
) -> list[LayoutInfo]:
    """Returns layouts in order of their ids, from the first after `after`, as they are at this
    time."""
    is_ready = images.c.state == ImageState.READY.value
    query = (
        select(
            layouts.c.layout_id,
            layouts.c.create_time,
            layouts.c.last_use_time,
            func.count(images.c.digest),
            func.sum(images.c.image_bytes),
        )
        .outerjoin(images, and_(images.c.layout_id == layouts.c.layout_id, is_ready))
        .where(layouts.c.layout_id > after)
        .group_by(layouts.c.layout_id)
        .order_by(layouts.c.layout_id)
        .limit(limit)
    )
    found = conn.execute(query).all()
    layout_ids = [row[0] for row in found]
    names = _names_of(conn, layout_ids)
    base_models = _announced_as(conn, layout_ids)
    now = to_micros(time)
    ranks = {
        layout_id: tuple(each.max_rank for each in present(announced, now, live_since))
        for layout_id, announced in servers(conn, layout_ids).items()
    }

    def others(layout_id: str, *, is_base_model: bool) -> tuple[str, ...]:
        found = (
            name
            for name in names[layout_id][1:]
            if ((layout_id, name) in base_models) is is_base_model
        )
        return tuple(islice(found, MAX_SHOWN_NAMES))

    return [
        LayoutInfo(
            layout_id,
            names[layout_id][0],
            others(layout_id, is_base_model=True),
            others(layout_id, is_base_model=False),
            ranks.get(layout_id, ()),
            num_images,
            int(image_bytes or 0),
            from_micros(create_time),
            from_micros(last_use_time),
        )
        for layout_id, create_time, last_use_time, num_images, image_bytes in found
    ]


def forget(conn: Connection, layout_id: str) -> int:
    """Deletes a layout with all that is known of its images; returns how many were compiled. Raises
    NotFound."""
    if _last_use(conn, layout_id) is None:
        raise NotFound(f"layout_id: no layout {layout_id}", subject="layout_id")
    is_ready = images.c.state == ImageState.READY.value
    compiled = select(func.count()).where(images.c.layout_id == layout_id, is_ready)
    num_images = conn.execute(compiled).scalar_one()
    _delete(conn, [layout_id])
    return num_images


def _delete(conn: Connection, layout_ids: Sequence[str]) -> None:
    for table in (images, announcements, layout_bases, layouts):
        conn.execute(delete(table).where(table.c.layout_id.in_(layout_ids)))


def forget_unused(conn: Connection, before: int, max_kept: int) -> list[str]:
    """Deletes layouts last used before this time, with all that is known of their images; returns
    them. Layouts of base models that have adapters are kept, the latest `max_kept` of them: a
    server may be connected all the time, and load nothing. Else a server registers its layout
    anew."""
    has_adapters = exists().where(
        layout_bases.c.layout_id == layouts.c.layout_id,
        versions.c.base_model == layout_bases.c.base_model,
    )
    old = select(layouts.c.layout_id).where(layouts.c.last_use_time < before).limit(MAX_FORGOTTEN)
    surplus = old.order_by(layouts.c.last_use_time.desc(), layouts.c.layout_id).offset(max_kept)
    gone = list(conn.scalars(old.where(~has_adapters))) or list(conn.scalars(surplus))
    if gone:
        _delete(conn, gone)
    return gone
