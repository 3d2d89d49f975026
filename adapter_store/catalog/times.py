"""The clock of a catalog, and the spans of time that its answers depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from adapter_store.catalog.tables import layouts, lookup
from adapter_store.core import AdapterRecord

DEFAULT_GRACE = timedelta(minutes=10)


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Times:
    """Deleted versions can be restored for `delete_grace`. A layout that was unused for longer than
    `layout_ttl` is not live; with 0 all are."""

    now: Callable[[], datetime] = utc_now
    delete_grace: timedelta = DEFAULT_GRACE
    layout_ttl: timedelta = timedelta(0)

    def deleted_after(self) -> datetime:
        """Returns the time since which deleted versions can be restored."""
        return self.now() - self.delete_grace

    def live_since(self) -> int:
        """Returns the time, in microseconds, since which a live layout was used."""
        return layouts.live_since(self.now(), self.layout_ttl)

    def shown(self, records: Sequence[AdapterRecord]) -> list[AdapterRecord]:
        """Returns the records as they are shown now; see lookup.shown."""
        now = lookup.to_micros(self.now())
        live_since = self.live_since()
        return [lookup.shown(record, now, live_since) for record in records]
