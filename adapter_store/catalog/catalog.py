"""The catalog of names, versions, layouts and images. Each use has a class of its own.

A method that takes `tenants` sees only their adapters, and others' as if they did not exist; with
None it sees all. All methods block and may be called from any thread. A method's result is durable.
Writers run one after the other; listeners are called in commit order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from adapter_store.catalog.blobs import BlobRecords
from adapter_store.catalog.database import ENDLESS, Place, Space, open_database
from adapter_store.catalog.expiry import Expiry
from adapter_store.catalog.history import History
from adapter_store.catalog.images import ImageStates
from adapter_store.catalog.layouts import Layouts
from adapter_store.catalog.leases import WorkLeases
from adapter_store.catalog.migrations import migrate
from adapter_store.catalog.names import Names
from adapter_store.catalog.servers import Servers
from adapter_store.catalog.tables import image_states, usage
from adapter_store.catalog.tables.layouts import LayoutLimits
from adapter_store.catalog.tables.usage import CatalogCounts
from adapter_store.catalog.times import DEFAULT_GRACE, Times, utc_now

NO_LAYOUT_LIMITS = LayoutLimits()


class Catalog:
    """Opens, or creates, the catalog at `place`, a file or the address of a PostgreSQL database.

    At least `event_retention` events are kept. Deleted versions can be restored for `delete_grace`.
    A layout unused for longer than `layout_ttl` is not live; with 0 all are. Of live ones there are
    no more than `layout_limits`. A file lies in `space`.
    """

    def __init__(
        self,
        place: Place,
        *,
        event_retention: int,
        delete_grace: timedelta = DEFAULT_GRACE,
        layout_ttl: timedelta = timedelta(0),
        layout_limits: LayoutLimits = NO_LAYOUT_LIMITS,
        space: Space = ENDLESS,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.times = times = Times(clock, delete_grace, layout_ttl)
        self.database = database = open_database(place, space)
        database.check()
        migrate(database)
        with database.write() as conn:
            image_states.forget_compiling(conn)
        self.history = History(database, event_retention)
        self.names = Names(database, self.history, times)
        self.servers = Servers(database, times, layout_limits.share)
        self.layouts = Layouts(database, times, layout_limits, self.servers)
        self.images = ImageStates(database, times)
        self.blobs = BlobRecords(database)
        self.expiry = Expiry(database, self.history, times)
        self.leases = WorkLeases(database)

    def counts(self) -> CatalogCounts:
        with self.database.read() as conn:
            return usage.counts(conn, self.times.live_since())

    def close(self) -> None:
        self.history.close()
        self.database.close()
