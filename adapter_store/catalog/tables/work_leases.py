"""Leases of work that only one replica may do at a time, until it releases the lease or stops
renewing it.

They expire by the database's clock, so replicas need not agree about the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, or_, select, update

from adapter_store.catalog.database import now_micros
from adapter_store.catalog.tables.schema import leases

FORGET_MICROS = 3600 * 1_000_000
"""Rows that expired this long ago are deleted."""


def acquire(conn: Connection, key: str, owner: str, seconds: float) -> bool:
    """Returns False if an owner has the lease and it has not expired."""
    now = now_micros(conn)
    holder = conn.scalar(select(leases.c.expire_time).where(leases.c.key == key))
    if holder is not None and holder > now:
        return False
    dead = leases.c.expire_time < now - FORGET_MICROS
    conn.execute(delete(leases).where(or_(leases.c.key == key, dead)))
    expire_time = now + int(seconds * 1e6)
    conn.execute(insert(leases).values(key=key, owner=owner, expire_time=expire_time))
    return True


def is_held(conn: Connection, key: str) -> bool:
    found = conn.scalar(select(leases.c.expire_time).where(leases.c.key == key))
    return found is not None and found > now_micros(conn)


def renew(conn: Connection, keys: Sequence[str], owner: str, seconds: float) -> None:
    """Renews the leases that are the owner's, also expired ones that no other owner took."""
    expire_time = now_micros(conn) + int(seconds * 1e6)
    where = (leases.c.key.in_(keys), leases.c.owner == owner)
    conn.execute(update(leases).where(*where).values(expire_time=expire_time))


def release(conn: Connection, key: str, owner: str) -> bool:
    """Returns False if the lease was no longer this owner's."""
    where = (leases.c.key == key, leases.c.owner == owner)
    return conn.execute(delete(leases).where(*where)).rowcount > 0


def end_expired(conn: Connection, keys: Sequence[str]) -> set[str]:
    """Returns the keys that no owner holds. Expired leases are deleted: they cannot be renewed."""
    now = now_micros(conn)
    conn.execute(delete(leases).where(leases.c.key.in_(keys), leases.c.expire_time <= now))
    return set(keys) - set(conn.scalars(select(leases.c.key).where(leases.c.key.in_(keys))))
