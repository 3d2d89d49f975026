"""Empty catalogs, short forms for calls of a catalog, and its events."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from sqlalchemy import Connection

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.database import ENDLESS as ENDLESS_SPACE
from adapter_store.catalog.database import Place, open_database
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.core import AdapterEvent
from servicekit.refs import AdapterName, AdapterRef
from tests.support.workers import share

BASE = "org/tiny"
CATALOG = "catalog.sqlite3"
WAIT_SECONDS = 60


@cache
def empty_catalog() -> bytes:
    """Returns the file of an empty catalog: migrations take longer than the rest of a start."""
    return share.once("empty-catalog", _migrated)


def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CATALOG)
        Catalog(path, event_retention=1).close()
        return path.read_bytes()


def make_data_folder(folder: Path) -> Path:
    """Makes a store's data folder with an empty catalog, unless it is there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / CATALOG).write_bytes(empty_catalog())
    return folder


class Clock:
    """Moves on by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(milliseconds=1)
        return self.now


class Names:
    """Short forms for what tests say often."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def new(self, name: str, digest: str, **fields: object) -> NewVersion:
        tenant, _, name = name.rpartition("/")
        values = {
            "base_model": BASE,
            "source_uri": f"file:///{digest}",
            "rank": 8,
            "targets": ("q_proj", "v_proj"),
            "source_bytes": 100,
            **fields,
        }
        return NewVersion(AdapterName(tenant or "default", name), digest, **values)

    def register(self, name: str, digest: str, if_current: str = "", **fields: object):
        """Gives the record and the revision."""
        return self.catalog.names.register(self.new(name, digest, **fields), if_current)[:2]

    def ref(self, name: str, version: int | None = None) -> AdapterRef:
        tenant, _, name = name.rpartition("/")
        return AdapterRef(AdapterName(tenant or "default", name), version)

    def get(self, name: str, version: int | None = None):
        return self.catalog.names.get(self.ref(name, version))[0]


class ReceivedEvents:
    """Collects the events of a catalog; `wait` blocks until there are so many."""

    def __init__(self, catalog: Catalog) -> None:
        self.events: list[AdapterEvent] = []
        self._changed = threading.Condition()
        catalog.history.on_change(self._add)

    def _add(self, events: list[AdapterEvent]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait(self, count: int) -> list[int]:
        """Returns their revisions."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, WAIT_SECONDS)
            return [event.revision for event in self.events]


@contextmanager
def connected(place: Place) -> Iterator[Connection]:
    """A connection to the database of a catalog that may be open; commits at the end."""
    database = open_database(place, ENDLESS_SPACE)
    try:
        with database.write() as conn:
            yield conn
    finally:
        database.close()


def live_layouts(catalog: Catalog) -> list[str]:
    return sorted(set(catalog.layouts.ids()) - catalog.layouts.unused())


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
