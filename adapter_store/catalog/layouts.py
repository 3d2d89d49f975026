"""The layouts that servers have registered, and their uses."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from adapter_store.catalog.database import Database, in_batches
from adapter_store.catalog.servers import Servers
from adapter_store.catalog.tables import announcements, layouts, schema
from adapter_store.catalog.tables.layouts import LayoutLimits
from adapter_store.catalog.times import Times
from adapter_store.core import LayoutInfo

PAGE_LAYOUTS = 64


class Layouts:
    """Layouts in the catalog, of which no more than `limits` are live."""

    def __init__(
        self, database: Database, times: Times, limits: LayoutLimits, servers: Servers
    ) -> None:
        self._database = database
        self._times = times
        self._limits = limits
        self._servers = servers
        self._uses: dict[str, datetime] = {}

    def add(self, layout_id: str, base_model: str, body: str, account: str = "") -> bool:
        """See layouts.add. Raises DiskFull, too, for a new one."""
        if not self.bases(layout_id):
            self._database.check_space(len(body))
        now, ttl, limits = self._times.now(), self._times.layout_ttl, self._limits
        with self._database.write() as conn:
            return layouts.add(
                conn, layout_id, base_model, body, now, ttl, account=account, limits=limits
            )

    def body(self, layout_id: str) -> str | None:
        with self._database.read() as conn:
            return layouts.body(conn, layout_id)

    def bases(self, layout_id: str) -> list[str]:
        """Returns the names of a layout's base model, none for an unknown one."""
        with self._database.read() as conn:
            return layouts.bases(conn, layout_id)

    def ids(self) -> list[str]:
        with self._database.read() as conn:
            return list(conn.scalars(select(schema.layouts.c.layout_id)))

    def page(self, after: str = "") -> tuple[list[LayoutInfo], str]:
        """Returns a page of layouts, from the first after the one with this id, and the id that the
        next page is after ("" for the last)."""
        now, live_since = self._times.now(), self._times.live_since()
        with self._database.read() as conn:
            page = layouts.page(conn, after, PAGE_LAYOUTS + 1, now, live_since)
        more = len(page) > PAGE_LAYOUTS
        return page[:PAGE_LAYOUTS], page[PAGE_LAYOUTS - 1].layout_id if more else ""

    def served(self) -> list[str]:
        """Returns the live layouts with a server, or whose last one has gone less than an hour
        ago."""
        has_server = announcements.has_server(self._times.now())
        with self._database.read() as conn:
            return layouts.live(conn, self._times.live_since(), has_server)

    def is_use_due(self, layout_id: str) -> bool:
        """Returns whether a use has to be recorded again. Does not block."""
        last = self._uses.get(layout_id)
        precision = layouts.precision(self._times.layout_ttl)
        return last is None or self._times.now() - last >= precision

    def use(self, layout_id: str) -> bool:
        """See layouts.use."""
        now = self._times.now()
        with self._database.write() as conn:
            is_back = layouts.use(conn, layout_id, now, self._times.layout_ttl, self._limits)
        self._uses[layout_id] = now
        return is_back

    def unused(self) -> frozenset[str]:
        with self._database.read() as conn:
            return layouts.unused(conn, self._times.live_since())

    def forget_unused_images(self) -> int:
        """See layouts.forget_unused_images."""
        since = self._times.live_since()
        return in_batches(self._database, lambda conn: layouts.forget_unused_images(conn, since))

    def forget_unused(self) -> list[str]:
        """Forgets layouts that were not used for FORGET_AFTER_TTLS. See layouts.forget_unused."""
        now, num_ttls = self._times.now(), layouts.FORGET_AFTER_TTLS
        before = layouts.live_since(now, self._times.layout_ttl, num_ttls)
        with self._database.write() as conn:
            gone = layouts.forget_unused(conn, before, self._limits.max_in_all)
        for layout_id in gone:
            self._uses.pop(layout_id, None)
        return gone

    def forget(self, layout_id: str) -> int:
        """See layouts.forget."""
        with self._database.write() as conn:
            num_images = layouts.forget(conn, layout_id)
        self._uses.pop(layout_id, None)
        self._servers.forget_renewals()
        return num_images
