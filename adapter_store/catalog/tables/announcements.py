"""Announcements: facts about the servers of a layout beside it, for as long as they live.

They count as there for PRESENT_FOR after a renewal. The announcement lasts for LASTS_FOR: so long
its layout is compiled ahead for, and its aliases are known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import (
    ColumnElement,
    Connection,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from adapter_store.catalog.database import upsert
from adapter_store.catalog.tables.lookup import (
    LASTS_FOR,
    PRESENT_FOR,
    dump_kinds,
    names_of,
    to_micros,
)
from adapter_store.catalog.tables.schema import announcements, layout_bases, layouts
from adapter_store.core import Announcement
from adapter_store.errors import LimitExceeded
from servicekit.shares import limit_of

RENEW_AFTER = timedelta(seconds=20)
"""The time after which an announcement is renewed, with the next event of a server's watch.
PRESENT_FOR allows for three of that beside the difference of clocks. Servers that announce the same
share one row, and so its writes."""
REPLICA_RENEWS_WITHIN = RENEW_AFTER + timedelta(seconds=5)
"""The time within which another replica renews it if it has servers of the same announcement."""
MAX_PER_LAYOUT = 16
"""Servers of one layout that say the same share an announcement. An account may have its share of
the number that others leave free."""


def add(
    conn: Connection,
    layout_id: str,
    announcement_id: str,
    announcement: Announcement,
    time: datetime,
    account: str,
    share: float,
) -> bool:
    """Records or renews an announcement, and its names of the base model as such of the layout.

    Returns whether there are new names, or the layout had no server. Raises LimitExceeded if it has
    too many announcements, or too many of this account.
    """
    expire(conn, time, layout_id)
    of_layout = announcements.c.layout_id == layout_id
    query = select(announcements.c.announcement_id, announcements.c.announced_by)
    known = {row[0]: row[1] for row in conn.execute(query.where(of_layout))}
    if announcement_id not in known:
        _check_limit(layout_id, list(known.values()), account, share)
    expire_time = to_micros(time + LASTS_FOR)
    aliases = sorted(set(announcement.aliases))
    conn.execute(
        upsert(conn, announcements)
        .values(
            announcement_id=announcement_id,
            layout_id=layout_id,
            base_model=announcement.base_model,
            aliases=json.dumps(aliases),
            max_rank=announcement.max_rank,
            expire_time=expire_time,
            is_renewed=announcement.is_renewed,
            announced_by=account,
            segment_kinds=dump_kinds(announcement.segment_kinds),
            lora_targets=json.dumps(sorted(set(announcement.lora_targets))),
            max_added_tokens=announcement.max_added_tokens,
            applies_invocation_tokens=announcement.applies_invocation_tokens,
            weight_form=announcement.weight_form,
            **announcement.part._asdict(),
        )
        .on_conflict_do_update(
            index_elements=["announcement_id"], set_={"expire_time": expire_time}
        )
    )
    names = select(layout_bases.c.base_model).where(layout_bases.c.layout_id == layout_id)
    said = {announcement.base_model, *aliases} - {""}
    new = said - set(conn.scalars(names))
    rows = [{"base_model": name, "layout_id": layout_id, "is_alias": True} for name in sorted(new)]
    if rows:
        conn.execute(insert(layout_bases), rows)
    return bool(rows) or not known


def _check_limit(layout_id: str, accounts: Sequence[str], account: str, share: float) -> None:
    own = accounts.count(account)
    others = len(accounts) - own
    if own >= limit_of(MAX_PER_LAYOUT, others, share) or len(accounts) >= MAX_PER_LAYOUT:
        of_which = f"; one tenant may have {share:.0%} of the number that others leave free"
        raise LimitExceeded(
            f"announcement: {layout_id} has {own} different announcements by "
            f"{account or 'all callers together'} and {others} by others, and at most "
            f"{MAX_PER_LAYOUT} are allowed{of_which if share < 1 else ''}; one expires an hour "
            "after its last server has left",
            subject="announcement",
            reason="ANNOUNCEMENT_LIMIT",
        )


def lasts(time: datetime) -> ColumnElement[bool]:
    """Returns whether an announcement, of the row that a query reads, counts at this time. One that
    is not renewed does while its layout is live, or is so again."""
    return or_(~announcements.c.is_renewed, announcements.c.expire_time > to_micros(time))


def has_server(time: datetime) -> ColumnElement[bool]:
    """Returns whether a layout, of the row that a query reads, has an announcement that lasts."""
    return exists().where(announcements.c.layout_id == layouts.c.layout_id, lasts(time))


def renew(conn: Connection, announcement_id: str, time: datetime) -> str | None:
    """Returns the announcement's layout; None for an unknown one."""
    key = announcements.c.announcement_id == announcement_id
    row = conn.execute(select(announcements).where(key)).first()
    if row is None:
        return None
    expire_time = to_micros(time + LASTS_FOR)
    if row.expire_time < expire_time:
        conn.execute(update(announcements).where(key).values(expire_time=expire_time))
    return str(row.layout_id)


def withdraw(
    conn: Connection,
    announcement_id: str,
    last_renewal: datetime,
    time: datetime,
    stays_for: timedelta,
) -> bool:
    """Counts an announcement's servers as gone after `stays_for`, unless it was renewed after
    `last_renewal`; returns whether it was not. It still lasts about as long as LASTS_FOR."""
    expire_time = to_micros(time + LASTS_FOR - PRESENT_FOR + stays_for)
    statement = update(announcements).where(
        announcements.c.announcement_id == announcement_id,
        announcements.c.is_renewed,
        announcements.c.expire_time <= to_micros(last_renewal + LASTS_FOR),
        announcements.c.expire_time > expire_time,
    )
    return conn.execute(statement.values(expire_time=expire_time)).rowcount > 0


def expire(conn: Connection, time: datetime, layout_id: str = "") -> int:
    """Deletes the announcements that have ended, of one layout or of all, with the aliases that no
    other announcement of their layout has; returns their number.

    Also removes announcements that are not renewed and were made before their last renewal, because
    these servers have been replaced. A server that is there all the same announces itself when it
    connects again.
    """
    of_layout = announcements.c.layout_id
    where = [announcements.c.is_renewed, announcements.c.expire_time <= to_micros(time)]
    if layout_id:
        where.append(of_layout == layout_id)
    ended = select(of_layout, func.max(announcements.c.expire_time)).where(*where)
    num_deleted = 0
    for ended_layout, last_end in conn.execute(ended.group_by(of_layout).order_by(of_layout)).all():
        gone = (of_layout == ended_layout, announcements.c.expire_time <= last_end)
        num_deleted += conn.execute(delete(announcements).where(*gone)).rowcount
        _drop_names(conn, ended_layout)
    return num_deleted


def _drop_names(conn: Connection, layout_id: str) -> None:
    """Deletes the names of a layout that no announcement has, but for the first."""
    of_layout = select(announcements).where(announcements.c.layout_id == layout_id)
    kept = {name for row in conn.execute(of_layout) for name in names_of(row)}
    conn.execute(
        delete(layout_bases).where(
            layout_bases.c.layout_id == layout_id,
            layout_bases.c.is_alias,
            layout_bases.c.base_model.not_in(kept),
        )
    )
