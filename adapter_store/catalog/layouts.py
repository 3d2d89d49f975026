"""Layouts, and which of them are live: a server has recently registered or pulled for them.

A layout is never deleted: a server that comes back after a long pause continues with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from adapter_store.catalog.lookup import to_micros
from adapter_store.catalog.schema import images, layout_bases, layouts
from adapter_store.core import ImageState
from adapter_store.errors import LimitExceeded
from servicekit.shares import limit_of

USE_PRECISION = timedelta(hours=1)
"""A use within this time of the last recorded one is not recorded."""


@dataclass(frozen=True, slots=True)
class Registrant:
    """Who registers a layout: an account, and how many layouts of a base model there may be."""

    account: str = ""
    max_layouts: int = 1 << 30
    share: float = 1.0


def precision(ttl: timedelta) -> timedelta:
    """Returns how exactly the last use is known: to the hour, or to a tenth of a short `ttl`."""
    return min(USE_PRECISION, ttl / 10) if ttl else USE_PRECISION


def live_since(time: datetime, ttl: timedelta) -> int:
    """Returns the earliest last use, in microseconds, of a live layout; 0 without a `ttl`."""
    return max(0, to_micros(time) - ttl // timedelta(microseconds=1)) if ttl else 0


def is_live(since: int) -> ColumnElement[bool]:
    return layouts.c.last_use_time >= since


def add(
    conn: Connection,
    layout_id: str,
    base_models: Sequence[str],
    body: dict[str, Any],
    time: datetime,
    ttl: timedelta,
    registrant: Registrant,
) -> bool:
    """Records a layout for its base model and aliases, or its use. Returns False if it was live.

    Raises LimitExceeded for a new one if one of the base models has too many live layouts, or the
    registrant has its share of them.
    """
    query = select(layouts.c.layout_id).where(layouts.c.layout_id == layout_id)
    if conn.execute(query).first():
        return use(conn, layout_id, time, ttl)
    now = to_micros(time)
    names = sorted(set(base_models))
    _check_limit(conn, names, live_since(time, ttl), registrant)
    conn.execute(
        insert(layouts).values(
            layout_id=layout_id,
            body=json.dumps(body),
            create_time=now,
            last_use_time=now,
            registered_by=registrant.account,
        )
    )
    conn.execute(
        insert(layout_bases), [{"base_model": name, "layout_id": layout_id} for name in names]
    )
    return True


def _check_limit(
    conn: Connection, base_models: Sequence[str], since: int, registrant: Registrant
) -> None:
    query = (
        select(layout_bases.c.base_model, layouts.c.registered_by, func.count())
        .join(layouts, layouts.c.layout_id == layout_bases.c.layout_id)
        .where(layout_bases.c.base_model.in_(base_models), is_live(since))
        .group_by(layout_bases.c.base_model, layouts.c.registered_by)
    )
    counts: dict[str, dict[str, int]] = {}
    for base_model, account, count in conn.execute(query):
        counts.setdefault(base_model, {})[account] = count
    for base_model, by_account in counts.items():
        own = by_account.pop(registrant.account, 0)
        others = sum(by_account.values())
        if own >= limit_of(registrant.max_layouts, others, registrant.share):
            raise LimitExceeded(
                f"layout.base_model: {own} layouts in use for {base_model!r} are registered by "
                f"{registrant.account or 'all callers together'}, {others} by others, and the most "
                f"are {registrant.max_layouts} (max_layouts), of which one tenant's share is at "
                f"most {registrant.share:.0%} of what others leave; one that is not used goes "
                "after layout_ttl_seconds",
                subject="layout.base_model",
                reason="LAYOUT_LIMIT",
            )


def use(conn: Connection, layout_id: str, time: datetime, ttl: timedelta) -> bool:
    """Records the use of a known layout, unless a recent one is recorded. Returns False if the
    layout was live."""
    query = select(layouts.c.last_use_time).where(layouts.c.layout_id == layout_id)
    last = conn.execute(query).scalar_one()
    now = to_micros(time)
    if now - last >= precision(ttl) // timedelta(microseconds=1):
        where = layouts.c.layout_id == layout_id
        conn.execute(update(layouts).where(where).values(last_use_time=now))
    return bool(last < live_since(time, ttl))


def body(conn: Connection, layout_id: str) -> dict[str, Any] | None:
    found = conn.scalar(select(layouts.c.body).where(layouts.c.layout_id == layout_id))
    return None if found is None else json.loads(found)


def live(conn: Connection, since: int) -> list[str]:
    return list(conn.scalars(select(layouts.c.layout_id).where(is_live(since))))


def unused(conn: Connection, since: int) -> frozenset[str]:
    """Returns the layouts that are not live."""
    return frozenset(conn.scalars(select(layouts.c.layout_id).where(~is_live(since))))


def forget_unused_images(conn: Connection, since: int) -> int:
    """Resets the images of unused layouts to pending; returns their number. INCOMPATIBLE verdicts
    stay."""
    gone = select(layouts.c.layout_id).where(~is_live(since))
    where = (images.c.state != ImageState.INCOMPATIBLE.value, images.c.layout_id.in_(gone))
    return conn.execute(delete(images).where(*where)).rowcount
