"""Servers count as there while they watch: virtual clock, real catalog."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapter_store.catalog import presence
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.presence import Presence
from adapter_store.catalog.tables.announcements import RENEW_AFTER, REPLICA_RENEWS_WITHIN
from adapter_store.core import Announcement
from adapter_store.errors import CatalogUnavailable, disk_full
from servicekit.errors import Draining, NotFound
from tests.support.store.catalogs import BASE, WAIT_SECONDS


@pytest.fixture
def announced(catalog, names, monkeypatch):
    """The layout "L" with an adapter, announced as "A"."""
    monkeypatch.setattr(presence, "GONE_AFTER_SECONDS", 0.0)
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", Announcement())
    names.register("a", "d1")
    return catalog


@pytest.fixture
def is_there(announced, names, clock):
    """Whether the adapter's verdicts count the server, once other replicas would have renewed."""

    def check() -> bool:
        clock.now += REPLICA_RENEWS_WITHIN
        (verdict,) = names.get("a").verdicts
        return bool(verdict.servers)

    return check


def run(catalog, body: Callable[[Presence], Awaitable[None]]) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            seen = Presence(catalog.servers, executor, lambda layout_id: None)
            await body(seen)
            await seen.close()

    asyncio.run(main())


async def others_end() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*tasks, return_exceptions=True)


def test_last_watch_that_ends_withdraws(announced, is_there):
    async def body(seen: Presence) -> None:
        with seen.watching("A"):
            with seen.watching("A"):
                pass
            await others_end()
            assert is_there()
        await others_end()
        assert not is_there()

    run(announced, body)


def test_server_that_comes_back_is_not_withdrawn(announced, is_there):
    async def body(seen: Presence) -> None:
        with seen.watching("A"):
            pass
        with seen.watching("A"):
            await others_end()
            assert is_there()

    run(announced, body)


@pytest.mark.parametrize("announcement_id", ["A", "unknown"])
def test_stop_of_the_store_withdraws_nothing(announced, is_there, announcement_id):
    async def body(seen: Presence) -> None:
        with pytest.raises(Draining), seen.watching("A"):
            raise Draining("stops")
        with seen.watching(announcement_id):
            pass
        await seen.close()
        assert is_there()

    run(announced, body)


class SlowRenewals:
    """Renewals of a catalog, in which a renewal waits until it may go on."""

    def __init__(self, catalog: Catalog) -> None:
        self.count = 0
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self._renew = catalog.servers.renew

    def renew(self, announcement_id: str) -> str | None:
        self.count += 1
        self.has_begun.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        return self._renew(announcement_id)


@pytest.fixture
def slow(announced, clock, monkeypatch):
    """Renewals of a catalog in which one of "A" is due."""
    slow = SlowRenewals(announced)
    monkeypatch.setattr(announced.servers, "renew", slow.renew)
    clock.now += RENEW_AFTER
    assert announced.servers.is_renewal_due("A")
    return slow


async def turns() -> None:
    """Lets all tasks run until they wait for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_event_that_wakes_all_watches_renews_once(announced, slow):
    async def body(seen: Presence) -> None:
        watches = [asyncio.create_task(seen.renew("A")) for _ in range(50)]
        await turns()
        slow.may_go_on.set()
        await asyncio.gather(*watches)
        assert not announced.servers.is_renewal_due("A")
        assert slow.count == 1

    run(announced, body)


def test_server_that_leaves_while_it_is_renewed_is_withdrawn(announced, slow, is_there):
    async def body(seen: Presence) -> None:
        async def watch() -> None:
            with seen.watching("A"):
                await seen.renew("A")

        watching = asyncio.create_task(watch())
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, slow.has_begun.wait, WAIT_SECONDS)
        watching.cancel()
        await turns()
        slow.may_go_on.set()
        await others_end()
        assert slow.count == 1
        assert not is_there()

    run(announced, body)


def refuse_renewals(catalog, patch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    """Lets all renewals fail; returns the list of those that are asked for."""
    asked: list[str] = []

    def fail(announcement_id: str) -> None:
        asked.append(announcement_id)
        raise error

    patch.setattr(catalog.servers, "renew", fail)
    return asked


@pytest.mark.parametrize("error", [disk_full(), ValueError("a bug")])
def test_outage_ends_no_watch_and_is_logged_once(announced, clock, monkeypatch, caplog, error):
    caplog.set_level(logging.INFO, presence.__name__)
    monkeypatch.setattr(presence, "RETRY_SECONDS", 0.0)
    clock.now += RENEW_AFTER

    async def body(seen: Presence) -> None:
        with monkeypatch.context() as patch:
            asked = refuse_renewals(announced, patch, error)
            for _ in range(3):
                await seen.renew("A")
            assert asked == ["A"] * 3
        await seen.renew("A")
        assert not announced.servers.is_renewal_due("A")

    run(announced, body)
    assert [each.message for each in caplog.records] == [
        "announcements cannot be renewed; trying again",
        "announcements are renewed again",
    ]


def test_catalog_that_refuses_renewals_is_asked_seldom(announced, clock, monkeypatch):
    monkeypatch.setattr(presence, "RETRY_SECONDS", 3600.0)
    asked = refuse_renewals(announced, monkeypatch, disk_full())
    announced.servers.announce("L", "B", Announcement(max_rank=8))
    clock.now += RENEW_AFTER

    async def body(seen: Presence) -> None:
        for announcement_id in ("A", "B", "A"):
            await seen.renew(announcement_id)

    run(announced, body)
    assert asked == ["A"]


@pytest.mark.parametrize("error", [CatalogUnavailable("no answer"), ValueError("a bug")])
def test_announcement_that_cannot_be_withdrawn_is_logged(
    announced, is_there, monkeypatch, caplog, error
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(announced.servers, "withdraw", fail)

    async def body(seen: Presence) -> None:
        with seen.watching("A"):
            pass
        await others_end()

    run(announced, body)
    assert [each.message for each in caplog.records] == [
        "an announcement was not withdrawn: it counts until it expires"
    ]
    assert is_there()


def test_unknown_announcement_is_refused(announced):
    async def body(seen: Presence) -> None:
        with pytest.raises(NotFound, match="register the layout again"):
            await seen.renew("unknown")

    run(announced, body)
