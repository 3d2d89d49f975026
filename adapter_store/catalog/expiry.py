"""The ends of versions: by their time to live, after deletion, with the store's process."""

from __future__ import annotations

from datetime import timedelta

from adapter_store.catalog.database import Database, in_batches
from adapter_store.catalog.history import History
from adapter_store.catalog.tables import leftovers
from adapter_store.catalog.tables import name_changes as changes
from adapter_store.catalog.tables import version_rows as rows
from adapter_store.catalog.times import Times


class Expiry:
    def __init__(self, database: Database, history: History, times: Times) -> None:
        self._database = database
        self._history = history
        self._times = times

    def is_due(self, ephemeral_grace: timedelta) -> bool:
        """See leftovers.is_due."""
        now = self._times.now()
        with self._database.read() as conn:
            return leftovers.is_due(conn, now, now - ephemeral_grace)

    def expire(self) -> int:
        """See changes.expire; returns how many names have lost versions."""
        with self._history.change() as (conn, made):
            made += changes.expire(conn, self._times.now())
            return len(made)

    def expire_deleted(self, grace: timedelta) -> int:
        """See leftovers.expire_versions."""
        before = self._times.now() - grace
        return in_batches(self._database, lambda conn: leftovers.expire_versions(conn, before))

    def expire_ephemeral(self, grace: timedelta, tenant: str | None = None) -> int:
        """See leftovers.expire_ephemeral."""
        before = self._times.now() - grace
        return in_batches(
            self._database, lambda conn: leftovers.expire_ephemeral(conn, before, tenant)
        )

    def forget_memory(self) -> int:
        """See changes.forget_memory; returns how many names have lost versions."""
        with self._database.read() as conn:
            if not rows.has_memory(conn):
                return 0
        with self._history.change(is_large=True) as (conn, made):
            made += changes.forget_memory(conn, self._times.now())
            return len(made)

    def forget_texts(self) -> int:
        """See leftovers.forget_texts."""
        return in_batches(self._database, leftovers.forget_texts)
