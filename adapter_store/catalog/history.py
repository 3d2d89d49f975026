"""The history of changes: who makes one, and who follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from adapter_store.catalog.database import Database, PostgresDatabase
from adapter_store.catalog.follower import Follower, notify
from adapter_store.catalog.tables import events
from adapter_store.core import AdapterEvent

_TRIM_EVERY = 64


class History:
    """The events of a catalog, of which at least `event_retention` are kept."""

    def __init__(self, database: Database, event_retention: int) -> None:
        self._database = database
        self._event_retention = event_retention
        self._listeners: list[Callable[[list[AdapterEvent]], None]] = []
        self._notifying = threading.Lock()
        self._follower: Follower | None = None
        if isinstance(database, PostgresDatabase):
            self._follower = Follower(database, self.revision(), self._notify)

    @property
    def is_shared(self) -> bool:
        """Whether other replicas may change the catalog, too."""
        return self._follower is not None

    @property
    def is_current(self) -> bool:
        """Whether the listeners were called for all commits except the ones of the last seconds. If
        not, the database does not answer, and other replicas may have changed it."""
        return self._follower is None or self._follower.is_current

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def on_change(self, listener: Callable[[list[AdapterEvent]], None]) -> None:
        """Calls `listener` with the events of each commit, in commit order, from some thread; in a
        shared catalog also of other replicas' commits, a moment later."""
        self._listeners.append(listener)

    def revision(self) -> int:
        with self._database.read() as conn:
            return events.revision(conn)

    def since(self, revision: int, limit: int) -> list[AdapterEvent]:
        """Returns events after a revision. Raises RevisionTooOld."""
        with self._database.read() as conn:
            return events.since(conn, revision, limit)

    @contextmanager
    def change(self, *, is_large: bool = False) -> Iterator[tuple[Connection, list[AdapterEvent]]]:
        """Opens a write transaction. The listeners are called with the events put into its list,
        once it is committed."""
        made: list[AdapterEvent] = []
        with self._notifying:
            with self._database.write(is_large=is_large) as conn:
                yield conn, made
                self._trim(conn, made)
                if made and self._follower is not None:
                    notify(conn)
            if made and self._follower is None:
                self._notify(made)

    def _notify(self, events: list[AdapterEvent]) -> None:
        for listener in self._listeners:
            listener(events)

    def _trim(self, conn: Connection, made: Sequence[AdapterEvent]) -> None:
        if any(event.revision % _TRIM_EVERY == 0 for event in made):
            events.forget_before(conn, made[-1].revision - self._event_retention + 1)
