"""Unused layouts: nothing is compiled for them, until they are used again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

import pytest

from adapter_store import build as store_module
from adapter_store.build import Store, open_store
from adapter_store.catalog.catalog import Catalog
from adapter_store.config import StoreSettings
from adapter_store.core import ANYONE, Announcement, ImageKey, ImageState
from adapter_store.errors import CatalogUnavailable
from adapter_store.images.plan import layout as layouts
from adapter_store.registration.registrar import Registration
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.catalogs import Clock, live_layouts
from tests.support.wait import until_async

TTL = timedelta(days=7)
WAIT_SECONDS = 60


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path, data_dir, clock, monkeypatch):
    """start(): a store over tmp_path, with the catalog on a clock that tests turn."""
    monkeypatch.setattr(store_module, "Catalog", partial(Catalog, clock=clock))

    @asynccontextmanager
    async def start_store(**others):
        settings = StoreSettings(
            data_dir=data_dir,
            source_roots=(tmp_path,),
            layout_ttl_seconds=TTL.total_seconds(),
            collect_seconds=0.05,
            **others,
        )
        async with open_store(settings) as store:
            yield store

    return start_store


async def register(store: Store, folder, name: str, **asked) -> str:
    registration = Registration(AdapterName("default", name), **asked)
    change = await store.use_cases.registering.register(ANYONE, registration, f"file://{folder}")
    return (await change.wait())[0].digest


async def pull(store: Store, digest: str, layout_id: str) -> None:
    async for _ in store.use_cases.pulls.stream(ImageKey(digest, layout_id), 0, "", None):
        pass
    await store.use_cases.layout_usage.wait_idle()
    await store.precompiler.wait_idle()


def state(store: Store, name: str) -> ImageState:
    record, _ = store.catalog.names.get(AdapterRef(AdapterName("default", name)))
    return record.verdicts[0].state


def num_images(store: Store) -> tuple[int, int]:
    """In memory, on disk."""
    return store.images.memory_counts.images, store.images.disk_counts.images


def test_unused_layout_is_live_after_a_pull(start, clock, make_adapter, make_layout):
    a, b, c = (make_adapter(folder=name, seed=seed) for seed, name in enumerate("abc"))

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = await register(store, a, "a", pinned=True)
            await store.precompiler.wait_idle()
            assert (num_images(store), state(store, "a")) == ((1, 1), ImageState.READY)
            clock.now += TTL + timedelta(seconds=1)
            await until_async(lambda: num_images(store) == (0, 0))
            # The clock may have been turned in the middle of a collection: the next one sees to it.
            await until_async(lambda: state(store, "a") is ImageState.PENDING)
            assert (await store.use_cases.status.read()).catalog.layouts == 0

            await register(store, b, "b")
            await store.precompiler.wait_idle()
            assert (num_images(store), state(store, "b")) == ((0, 0), ImageState.PENDING)
        async with start() as store:
            await store.precompiler.wait_idle()
            assert num_images(store) == (0, 0)

            with pytest.raises(NotFound):
                await pull(store, "sha256:" + "0" * 64, layout_id)
            assert (await store.use_cases.status.read()).catalog.layouts == 0
            await pull(store, digest, layout_id)
            assert (await store.use_cases.status.read()).catalog.layouts == 1
            # A verdict is recorded concurrently with the pull, which does not wait for it.
            for name in ("a", "b"):
                await until_async(lambda name=name: state(store, name) is ImageState.READY)
            await until_async(lambda: ImageKey(digest, layout_id) in store.images._pinned)
            await register(store, c, "c")
            await store.precompiler.wait_idle()
            assert state(store, "c") is ImageState.READY

    asyncio.run(main())


def test_unused_layout_is_live_after_registration(start, clock, make_adapter, make_layout):
    a, b = (make_adapter(folder=name, seed=seed) for seed, name in enumerate("ab"))

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await register(store, a, "a", pinned=True)
            await store.precompiler.wait_idle()
            clock.now += 2 * TTL
            await until_async(lambda: num_images(store) == (0, 0))
            await register(store, b, "b")
            again = await store.use_cases.layouts.register(make_layout(), [1])
            assert again[:2] == (layout_id, 1)
            await store.precompiler.wait_idle()
            assert {state(store, "a"), state(store, "b")} == {ImageState.READY}
            await until_async(lambda: num_images(store)[0] >= 1)

    asyncio.run(main())


def test_nothing_is_compiled_ahead_without_a_server(start, clock, make_adapter, make_layout):
    folders = [make_adapter(folder=name, seed=seed) for seed, name in enumerate("abcd")]

    async def main() -> None:
        async with start() as store:

            async def announce() -> str:
                accepted = await store.use_cases.layouts.register(
                    make_layout(), [1], announcement=Announcement(max_rank=8)
                )
                return accepted.announcement_id

            async def registered(name: str, **asked) -> ImageState:
                await register(store, folders["abcd".index(name)], name, **asked)
                await store.precompiler.wait_idle()
                return state(store, name)

            announcement_id = await announce()
            assert await registered("a") is ImageState.READY
            clock.now += timedelta(minutes=50)
            events = store.use_cases.watching.stream(ANYONE, 0, announcement_id)
            await anext(events)
            await events.aclose()
            clock.now += timedelta(minutes=50)
            assert await registered("b") is ImageState.READY
            clock.now += timedelta(minutes=11)
            assert await registered("c") is ImageState.PENDING
            assert await registered("d", pinned=True) is ImageState.PENDING
            assert state(store, "a") is ImageState.READY, "its images stay for when it comes back"
            await announce()
            await store.precompiler.wait_idle()
            assert {state(store, "c"), state(store, "d")} == {ImageState.READY}

    asyncio.run(main())


def test_pulls_keep_a_layout_and_write_once_per_hour(
    start, clock, make_adapter, make_layout, monkeypatch
):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = await register(store, folder, "a")
            await store.precompiler.wait_idle()
            recorded: list[str] = []
            use_layout = store.catalog.layouts.use

            def counted(layout_id: str) -> bool:
                recorded.append(layout_id)
                return use_layout(layout_id)

            monkeypatch.setattr(store.catalog.layouts, "use", counted)
            for _ in range(3):
                for _ in range(5):
                    await pull(store, digest, layout_id)
                clock.now += TTL - timedelta(minutes=1)
            assert recorded == [layout_id] * 3
            await until_async(lambda: state(store, "a") is ImageState.READY)
            assert live_layouts(store.catalog) == [layout_id]

    asyncio.run(main())


def test_a_use_that_cannot_be_recorded_fails_no_pull(
    start, clock, make_adapter, make_layout, monkeypatch
):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = await register(store, folder, "a")

            def fail(layout_id: str) -> bool:
                raise CatalogUnavailable("the disk is full")

            with monkeypatch.context() as patch:
                patch.setattr(store.catalog.layouts, "use", fail)
                await pull(store, digest, layout_id)
            clock.now += TTL - timedelta(minutes=1)
            await pull(store, digest, layout_id)
            clock.now += TTL - timedelta(minutes=1)
            assert live_layouts(store.catalog) == [layout_id]

    asyncio.run(main())


def test_replica_may_leave_precompilation_to_others(start, make_adapter, make_layout):
    a, b = (make_adapter(folder=name, seed=seed) for seed, name in enumerate("ab"))

    async def main() -> None:
        async with start(compile_ahead=False) as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = await register(store, a, "a")
            await store.precompiler.wait_idle()
            assert (num_images(store), state(store, "a")) == ((0, 0), ImageState.PENDING)
            await register(store, b, "b", pinned=True)
            await store.precompiler.wait_idle()
            assert num_images(store) == (1, 1), "what is pinned never waits"
        async with start(compile_ahead=False) as store:
            await store.precompiler.wait_idle()
            assert state(store, "a") is ImageState.PENDING
            await pull(store, digest, layout_id)
            await until_async(lambda: state(store, "a") is ImageState.READY)

    asyncio.run(main())


def test_layouts_of_other_replicas_are_precompiled(start, make_adapter, make_layout):
    async def main() -> None:
        async with start() as store:
            await register(store, make_adapter(), "a")
            layout = make_layout()
            texts = layouts.layout_id(layout), layout.base_model, layouts.to_text(layout)
            await asyncio.to_thread(store.catalog.layouts.add, *texts)
            announced = layouts.layout_id(layout), "announced", Announcement()
            await asyncio.to_thread(store.catalog.servers.announce, *announced)
            await until_async(lambda: num_images(store)[1] == 1)
            await until_async(lambda: state(store, "a") is ImageState.READY)

    asyncio.run(main())
