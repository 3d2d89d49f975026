"""Receives the events of other replicas' commits: by notification, and by polling."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from adapter_store.catalog.database import PostgresDatabase
from adapter_store.catalog.tables import events
from adapter_store.core import AdapterEvent
from adapter_store.errors import CatalogUnavailable, RevisionTooOld

logger = logging.getLogger(__name__)

CHANNEL = "loadout_changes"
POLL_SECONDS = 1.0
STALE_SECONDS = 3.0
"""After this long without an answer to a poll, the commits of others are not known."""
STOP_SECONDS = 0.2
RETRY_SECONDS = 0.2
BATCH_EVENTS = 256


def notify(conn: Connection) -> None:
    """Wakes the followers of all replicas when this transaction commits."""
    conn.exec_driver_sql(f"NOTIFY {CHANNEL}")


class Follower:
    """A thread that calls `on_events` with every event after `since_revision`, in commit order.

    While the database does not answer it retries, and then continues where it was.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        since_revision: int,
        on_events: Callable[[list[AdapterEvent]], None],
    ) -> None:
        self._database = database
        self._position = since_revision
        self._on_events = on_events
        self._current_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether all events committed STALE_SECONDS ago have been received."""
        return time.monotonic() - self._current_s < STALE_SECONDS

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        is_down = False
        while not self._stopping.is_set():
            try:
                with self._database.listen(CHANNEL) as wait:
                    is_down = False
                    self._follow(wait)
            except (CatalogUnavailable, SQLAlchemyError) as error:
                if not is_down:
                    logger.warning(
                        "no events from the catalog's database; trying again",
                        extra={"why": str(error)},
                    )
                is_down = True
                self._stopping.wait(RETRY_SECONDS)
            except Exception:
                logger.exception("following the catalog failed; trying again")
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self, wait: Callable[[float], bool]) -> None:
        self._catch_up()
        waited = 0.0
        while not self._stopping.is_set():
            was_notified = wait(STOP_SECONDS)
            waited += STOP_SECONDS
            if was_notified or waited >= POLL_SECONDS:
                self._catch_up()
                waited = 0.0

    def _catch_up(self) -> None:
        polled_s = time.monotonic()
        while found := self._read():
            self._on_events(found)
            self._position = found[-1].revision
            polled_s = time.monotonic()
        self._current_s = polled_s

    def _read(self) -> list[AdapterEvent]:
        with self._database.read() as conn:
            try:
                return events.since(conn, self._position, BATCH_EVENTS)
            except RevisionTooOld:  # disconnected for longer than events are kept
                self._position = events.oldest(conn) - 1
                return events.since(conn, self._position, BATCH_EVENTS)
