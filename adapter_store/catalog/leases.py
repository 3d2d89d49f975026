"""Leases of joint work, so that one replica does it."""

from __future__ import annotations

from collections.abc import Sequence

from adapter_store.catalog.database import Database
from adapter_store.catalog.tables import work_leases


class WorkLeases:
    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, key: str, owner: str, seconds: float) -> bool:
        with self._database.write() as conn:
            return work_leases.acquire(conn, key, owner, seconds)

    def is_held(self, key: str) -> bool:
        with self._database.read() as conn:
            return work_leases.is_held(conn, key)

    def renew(self, keys: Sequence[str], owner: str, seconds: float) -> None:
        with self._database.write() as conn:
            work_leases.renew(conn, keys, owner, seconds)

    def release(self, key: str, owner: str) -> None:
        with self._database.write() as conn:
            work_leases.release(conn, key, owner)
