"""A replica's pins follow what others change, also past a database that was away."""

from __future__ import annotations

import asyncio

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.errors import CatalogUnavailable
from adapter_store.replication import pin_refresh as followed_module
from adapter_store.replication.pin_refresh import PinRefresher
from servicekit.refs import AdapterName


def test_pins_that_could_not_be_refreshed_are_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(followed_module, "RETRY_SECONDS", 0.01)
    catalog = Catalog(tmp_path / "catalog.sqlite3", event_retention=10)
    failures: list[Exception] = [CatalogUnavailable("gone"), ValueError("a bug")]

    async def main() -> None:
        refreshed = asyncio.Event()

        async def refresh() -> None:
            if failures:
                raise failures.pop()
            refreshed.set()

        followed = PinRefresher(catalog.history, refresh)
        name = AdapterName("default", "a")
        catalog.names.register(NewVersion(name, "d", "base", "", 1, (), 1))
        async with asyncio.timeout(60):
            await refreshed.wait()
        followed.close()

    asyncio.run(main())
    catalog.close()
    assert not failures
