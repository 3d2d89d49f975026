from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing, closing

import pytest

from adapter_store.catalog import follower as follower_module
from adapter_store.catalog import watch as watch_module
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.catalog.watch import Watch
from adapter_store.core import EventKind
from adapter_store.errors import RevisionTooOld
from servicekit.errors import Draining
from servicekit.refs import AdapterName
from servicekit.shares import FairExecutor, Shares
from tests.support.wait import until_async


@pytest.fixture
def catalog(catalog_file):
    catalog = Catalog(catalog_file, event_retention=20)
    yield catalog
    catalog.close()


def register(catalog: Catalog, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        name = AdapterName("default", f"n{i}")
        catalog.names.register(NewVersion(name, f"d{i}", "base", "", 1, (), 1))


def run(catalog, scenario, bookmark_seconds: float = 30.0):
    async def main():
        with closing(FairExecutor(2, "calls")) as calls:
            watch = Watch(catalog.history, calls, bookmark_seconds, Shares("watches", 1000))
            async with asyncio.timeout(60):
                return await scenario(watch)

    return asyncio.run(main())


async def take(events, count: int) -> list[int]:
    return [(await anext(events)).revision for _ in range(count)]


def test_the_past_then_what_happens(catalog):
    register(catalog, 3)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(1)) as events:
            assert await take(events, 2) == [2, 3]
            waiting = asyncio.create_task(take(events, 2))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await asyncio.to_thread(register, catalog, 2, 3)
            assert await waiting == [4, 5]

    run(catalog, scenario)


@pytest.mark.parametrize(
    ("num_watchers", "num_events"), [(100, 20), pytest.param(200, 40, marks=pytest.mark.long)]
)
def test_many_watchers_see_every_event_once(catalog, num_watchers, num_events):
    async def scenario(watch: Watch) -> None:
        streams = [watch.stream(0) for _ in range(num_watchers)]
        takes = [asyncio.create_task(take(stream, num_events)) for stream in streams]
        await asyncio.to_thread(register, catalog, num_events)
        for found in await asyncio.gather(*takes):
            assert found == list(range(1, num_events + 1))
        assert watch.num_watchers == num_watchers
        for stream in streams:
            await stream.aclose()
        assert watch.num_watchers == 0

    run(catalog, scenario)


def test_bookmarks_in_silence_carry_the_revision(catalog):
    register(catalog, 2)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(2)) as events:
            for _ in range(2):
                event = await anext(events)
                assert (event.kind, event.revision) == (EventKind.BOOKMARK, 2)

    run(catalog, scenario, bookmark_seconds=0.05)


def test_a_watch_that_knows_nothing_of_the_database_is_silent(postgres, catalog_dsn, monkeypatch):
    """Bookmarks that went on would tell watchers that names have not changed."""
    monkeypatch.setattr(follower_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(follower_module, "STALE_SECONDS", 0.4)
    catalog = Catalog(catalog_dsn, event_retention=20)
    register(catalog, 1)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(1)) as events:
            assert (await anext(events)).kind is EventKind.BOOKMARK
            await asyncio.to_thread(postgres.stop)
            try:
                await until_async(lambda: not catalog.history.is_current)
                waiting = asyncio.ensure_future(anext(events))
                await asyncio.wait({waiting}, timeout=0.3)
                assert not waiting.done()
            finally:
                await asyncio.to_thread(postgres.start)
            assert (await waiting).kind is EventKind.BOOKMARK

    try:
        run(catalog, scenario, bookmark_seconds=0.05)
    finally:
        catalog.close()


def test_a_slow_watcher_reads_on_from_the_catalog(catalog, monkeypatch):
    monkeypatch.setattr(watch_module, "RECENT_EVENTS", 8)
    monkeypatch.setattr(watch_module, "BATCH_EVENTS", 5)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(0)) as events:
            await asyncio.to_thread(register, catalog, 1)
            assert await take(events, 1) == [1]
            await asyncio.to_thread(register, catalog, 60, 1)
            assert await take(events, 60) == list(range(2, 62))

    run(catalog, scenario)


def test_watcher_behind_the_history_gets_an_error(catalog, monkeypatch):
    monkeypatch.setattr(watch_module, "RECENT_EVENTS", 8)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(0)) as events:
            await asyncio.to_thread(register, catalog, 1)
            assert await take(events, 1) == [1]
            await asyncio.to_thread(register, catalog, 80, 1)
            with pytest.raises(RevisionTooOld):
                await anext(events)

    run(catalog, scenario)


def register_for(catalog: Catalog, *tenants: str) -> None:
    for tenant in tenants:
        number = catalog.history.revision() + 1
        name = AdapterName(tenant, f"n{number}")
        catalog.names.register(NewVersion(name, f"d{number}", "base", "", 1, (), 1))


async def read_until(events, until_revision: int) -> list[tuple[int, str]]:
    """(revision, tenant) of what comes, up to a revision; a bookmark has no tenant."""
    found = []
    async for event in events:
        found.append((event.revision, event.tenant))
        if event.revision >= until_revision:
            break
    return found


def test_others_events_are_passed_over_with_bookmarks(catalog):
    register_for(catalog, "a", "b", "b", "a", "b")

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(0, frozenset({"a", "c"}))) as events:
            assert await read_until(events, 5) == [(1, "a"), (4, "a"), (5, "")]
            await asyncio.to_thread(register_for, catalog, "b")
            assert await read_until(events, 6) == [(6, "")]
            await asyncio.to_thread(register_for, catalog, "c")
            assert await read_until(events, 7) == [(7, "c")]
        async with aclosing(watch.stream(2, frozenset())) as events:
            assert await read_until(events, 7) == [(7, "")]

    run(catalog, scenario)


def test_filtered_watcher_catches_up_in_batches(catalog, monkeypatch):
    monkeypatch.setattr(watch_module, "RECENT_EVENTS", 8)
    monkeypatch.setattr(watch_module, "BATCH_EVENTS", 5)
    register_for(catalog, *["b"] * 23)

    async def scenario(watch: Watch) -> None:
        async with aclosing(watch.stream(0, frozenset({"a"}))) as events:
            assert await read_until(events, 23) == [(at, "") for at in (5, 10, 15, 20, 23)]

    run(catalog, scenario)


@pytest.mark.parametrize("since", [4, 10**15])
def test_a_revision_that_has_not_been_is_refused(catalog, since):
    register(catalog, 3)

    async def scenario(watch: Watch) -> None:
        with pytest.raises(RevisionTooOld):
            await anext(watch.stream(since))

    run(catalog, scenario)


def test_closing_ends_every_watcher(catalog):
    register(catalog, 1)

    async def scenario(watch: Watch) -> None:
        waiting = [asyncio.ensure_future(anext(watch.stream(1))) for _ in range(3)]
        await asyncio.sleep(0.05)
        watch.close()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, Draining)
        with pytest.raises(Draining):
            await anext(watch.stream(1))

    run(catalog, scenario)


def test_change_after_the_loop_has_ended(catalog):
    async def scenario(watch: Watch) -> None:
        pass

    run(catalog, scenario)
    register(catalog, 1)
    assert catalog.history.revision() == 1


def test_watchers_of_a_database_that_was_put_back_list_again(catalog, tmp_path):
    """PostgreSQL's follower tells what it finds there, from the oldest on."""
    register(catalog, 5)
    events = catalog.history.since(0, 10)

    async def scenario(watch: Watch) -> None:
        watch._on_change(events)  # known from the start
        watch._on_change([dataclasses.replace(events[0], revision=6)])
        async with aclosing(watch.stream(6)) as watching:
            waiting = asyncio.create_task(anext(watching))
            await asyncio.sleep(0)
            watch._on_change(events)
            with pytest.raises(RevisionTooOld):
                await waiting
        async with aclosing(watch.stream(3)) as watching:
            assert await take(watching, 2) == [4, 5]

    run(catalog, scenario)
