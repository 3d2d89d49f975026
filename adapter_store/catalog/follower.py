"""Hears of what other replicas committed: notified at once, and by looking from time to time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from adapter_store.catalog import events
from adapter_store.catalog.database import PostgresDatabase
from adapter_store.core import AdapterEvent
from adapter_store.errors import CatalogUnavailable, RevisionTooOld

logger = logging.getLogger(__name__)

CHANNEL = "loadout_changes"
LOOK_SECONDS = 1.0
BEHIND_SECONDS = 3.0
"""It looks every second: after this long without an answer it does not know what was committed."""
STOP_SECONDS = 0.2
RETRY_SECONDS = 0.2
BATCH_EVENTS = 256


def notify(conn: Connection) -> None:
    """Wakes the followers of all replicas when this transaction commits."""
    conn.exec_driver_sql(f"NOTIFY {CHANNEL}")


class Follower:
    """A thread that calls `tell` with every event after `since_revision`, in commit order.

    While the database does not answer it tries again; then it goes on where it was.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        since_revision: int,
        tell: Callable[[list[AdapterEvent]], None],
    ) -> None:
        self._database = database
        self._position = since_revision
        self._tell = tell
        self._known_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether all that had been committed BEHIND_SECONDS ago has been told."""
        return time.monotonic() - self._known_s < BEHIND_SECONDS

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
                    logger.warning("the catalog cannot be followed", extra={"why": str(error)})
                is_down = True
                self._stopping.wait(RETRY_SECONDS)
            except Exception:
                logger.exception("following the catalog failed; it goes on")
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self, wait: Callable[[float], bool]) -> None:
        self._catch_up()
        waited = 0.0
        while not self._stopping.is_set():
            was_notified = wait(STOP_SECONDS)
            waited += STOP_SECONDS
            if was_notified or waited >= LOOK_SECONDS:
                self._catch_up()
                waited = 0.0

    def _catch_up(self) -> None:
        asked_s = time.monotonic()
        while found := self._read():
            self._tell(found)
            self._position = found[-1].revision
            asked_s = time.monotonic()
        self._known_s = asked_s

    def _read(self) -> list[AdapterEvent]:
        with self._database.read() as conn:
            try:
                return events.since(conn, self._position, BATCH_EVENTS)
            except RevisionTooOld:  # away for longer than events are kept
                self._position = events.oldest(conn) - 1
                return events.since(conn, self._position, BATCH_EVENTS)
