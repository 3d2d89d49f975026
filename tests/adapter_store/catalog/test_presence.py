"""Servers count as there while they watch: virtual clock, real catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapter_store.catalog import presence
from adapter_store.catalog.announcements import REPLICA_RENEWS_WITHIN
from adapter_store.catalog.presence import Presence
from adapter_store.core import Announcement
from adapter_store.errors import CatalogUnavailable
from servicekit.errors import Draining, NotFound
from tests.adapter_store.catalog.conftest import BASE


@pytest.fixture
def announced(catalog, names, monkeypatch):
    """The layout "L" with an adapter, announced as "A"."""
    monkeypatch.setattr(presence, "GONE_AFTER_SECONDS", 0.0)
    catalog.add_layout("L", BASE, "{}")
    catalog.announce("L", "A", Announcement())
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
            seen = Presence(catalog, executor, lambda layout_id: None)
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


def test_catalog_that_does_not_answer_ends_no_watch(announced, is_there, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise CatalogUnavailable("the catalog does not answer")

    monkeypatch.setattr(announced, "renew", fail)
    monkeypatch.setattr(announced, "withdraw", fail)
    monkeypatch.setattr(announced, "is_renewal_due", lambda _: True)

    async def body(seen: Presence) -> None:
        with seen.watching("A"):
            await seen.renew("A")
        await others_end()

    run(announced, body)
    assert [each.message for each in caplog.records] == [
        "an announcement was not renewed: the catalog does not answer",
        "an announcement was not withdrawn: it expires",
    ]
    assert is_there()


def test_unknown_announcement_is_refused(announced):
    async def body(seen: Presence) -> None:
        with pytest.raises(NotFound, match="register the layout again"):
            await seen.renew("unknown")

    run(announced, body)
