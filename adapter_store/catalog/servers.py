"""The servers' announcements, which hold for as long as the servers renew them."""

from __future__ import annotations

from datetime import datetime, timedelta

from adapter_store.catalog.database import Database
from adapter_store.catalog.tables import announcements, lookup
from adapter_store.catalog.times import Times
from adapter_store.core import Announcement


class Servers:
    """Announcements of servers. One account makes no more than its `share` of a layout's."""

    def __init__(self, database: Database, times: Times, share: float) -> None:
        self._database = database
        self._times = times
        self._share = share
        self._renewals: dict[str, datetime] = {}

    def announce(
        self, layout_id: str, announcement_id: str, announcement: Announcement, account: str = ""
    ) -> bool:
        """See announcements.add."""
        now = self._times.now()
        with self._database.write() as conn:
            is_first = announcements.add(
                conn,
                layout_id,
                announcement_id,
                announcement,
                now,
                account=account,
                share=self._share,
            )
        self._renewals[announcement_id] = now
        return is_first

    def is_renewal_due(self, announcement_id: str) -> bool:
        """Returns whether an announcement has to be renewed. Does not block."""
        last = self.last_renewal(announcement_id)
        return last is None or self._times.now() - last >= announcements.RENEW_AFTER

    def last_renewal(self, announcement_id: str) -> datetime | None:
        """Returns when this replica last renewed an announcement."""
        return self._renewals.get(announcement_id)

    def renew(self, announcement_id: str) -> str | None:
        """See announcements.renew."""
        now = self._times.now()
        with self._database.write() as conn:
            layout_id = announcements.renew(conn, announcement_id, now)
        if layout_id is not None:
            self._renewals[announcement_id] = now
        return layout_id

    def withdraw(self, announcement_id: str, last_renewal: datetime) -> None:
        """Counts the servers of an announcement as gone, unless it was renewed after this one's
        `last_renewal`; in a shared catalog once other replicas would have renewed it."""
        now = self._times.now()
        is_shared = self._database.is_shared
        stays_for = announcements.REPLICA_RENEWS_WITHIN if is_shared else timedelta(0)
        with self._database.write() as conn:
            is_withdrawn = announcements.withdraw(
                conn, announcement_id, last_renewal, now, stays_for
            )
        if is_withdrawn:
            self._renewals.pop(announcement_id, None)  # a server that comes back renews it at once

    def expire(self) -> int:
        """See announcements.expire."""
        now = self._times.now()
        with self._database.write() as conn:
            num_ended = announcements.expire(conn, now)
        old = [key for key, last in self._renewals.items() if now - last > lookup.LASTS_FOR]
        for key in old:
            self._renewals.pop(key, None)
        return num_ended

    def forget_renewals(self) -> None:
        """Makes every renewal due, so that servers of a layout that is gone notice it with the next
        events of their watches."""
        self._renewals.clear()
