"""The watch of the store: the layout, the events, and replicas, over real channels."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from contract.images.dtypes import FLOAT8
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import FLOAT8_FORMATS
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store import client as store_client
from inference_svc.store import watch as store_watch
from inference_svc.store.adapter_resolver import Directory, Servable
from inference_svc.store.client import CatalogClient
from inference_svc.store.credentials import NO_ACCESS
from inference_svc.store.replicas import Replicas, rank
from inference_svc.store.types import Announcement, HistoryGone, NameEvent
from inference_svc.store.watch import CatalogWatch, StoreConnection
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.inference_svc.tiny_store import ANNOUNCEMENT, LAYOUT, TinyStore, running, serve
from tests.support.wait import until_async

ANNOUNCED = Announcement(("b",), 16)


class Watched:
    """A directory whose watch runs while the block does."""

    def __init__(self, store: str | Replicas, *layouts: Any) -> None:
        self.client = CatalogClient(Replicas.at(store) if isinstance(store, str) else store)
        self.directory = Directory(self.client, Servable(("base",), 16), 300.0)
        self.layout_ids: list[str] = []
        self.watch = CatalogWatch(
            self.client,
            self.directory,
            layouts,
            ANNOUNCED,
            lambda layout_id, others: self.layout_ids.extend((layout_id, *others)),
        )

    async def __aenter__(self) -> "Watched":
        self._task = asyncio.create_task(self.watch.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()


def test_server_that_is_not_announced_tries_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "ANNOUNCE_AGAIN_SECONDS", 0.0)

    async def body(store: TinyStore, address: str) -> None:
        store.announcement_id = ""
        async with Watched(address, engine.layout) as watched:
            store.emit(6)
            store.emit(7)
            await until_async(lambda: watched.directory.revision == 7)
            assert len(store.layouts) == 3
            assert watched.layout_ids == [LAYOUT]
            assert store.watched_for == [""]

    serve(body)


def test_layouts_of_other_ranks_are_renewed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch keeps them."""
    monkeypatch.setattr(store_watch, "RENEW_SECONDS", 0.0)

    async def body(store: TinyStore, address: str) -> None:
        async with Watched(address, engine.layout, engine.layout, engine.layout) as watched:
            await until_async(lambda: watched.layout_ids == [LAYOUT] * 3)
            assert len(store.layouts) == 3
            store.emit(6)
            store.emit(7)
            await until_async(lambda: watched.directory.revision == 7)
            assert len(store.layouts) == 3 + 2 * 2
            said = [(each.rank_index, each.first_announcement_id) for each in store.announcements]
            others = [(1, ANNOUNCEMENT), (2, ANNOUNCEMENT)]
            assert said == [(0, ""), *others * 3]

    serve(body)


def test_server_that_leaves_ends_its_watch_and_still_resolves(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        connection = StoreConnection([address], Replicas.at(address), NO_ACCESS)
        directory = Directory(connection.catalog, Servable(("base",), 16), 300.0)
        connection.start(directory, (engine.layout,), ANNOUNCED, lambda *_: None)
        await until_async(lambda: store.watched_for == [ANNOUNCEMENT])
        store.emit(5)
        await until_async(lambda: directory.is_live)
        await connection.leave()
        assert not directory.is_live
        await until_async(lambda: store.watches_ended == 1)
        assert (await connection.catalog.get_adapter("upper")).version == 2
        assert store.watched_for == [ANNOUNCEMENT]
        await connection.close()

    serve(body)


def test_layout_is_registered_and_names_are_watched(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        async with Watched(address, engine.layout) as watched:
            store.emit(5)
            await until_async(lambda: watched.directory.is_live)
            assert watched.layout_ids == [LAYOUT]
            assert watched.directory.layout_id == LAYOUT
            # The directory is live before the store has the call.
            await until_async(lambda: store.watched_from == [5])
            assert store.watched_for == [ANNOUNCEMENT]
            store.emit(6, pb.EVENT_KIND_UPDATED, "default/upper")
            store.emit(8)
            await until_async(lambda: watched.directory.revision == 8)
        (layout,) = store.layouts
        (announcement,) = store.announcements
        assert (layout.base_model, list(layout.aliases)) == ("base", [])
        assert (list(announcement.aliases), announcement.max_rank) == (["b"], 16)
        assert layout.dtype == pb.DATA_TYPE_BFLOAT16
        embedding, q_proj = layout.targets
        assert embedding.kind == pb.TARGET_KIND_EMBEDDING
        assert not embedding.HasField("layer")
        assert (q_proj.kind, q_proj.layer, q_proj.group) == (
            pb.TARGET_KIND_LINEAR,
            0,
            "layers.0.qkv",
        )
        assert (q_proj.in_features, q_proj.out_features) == (8, 4)
        assert list(layout.image_formats) == [1]

    serve(body)


def test_a_store_of_before_format_2_gets_a_layout_that_it_knows(engine: Any) -> None:
    norm = Target("model.norm", None, "norm", TargetKind.VECTOR, 0, 8)
    layout = replace(engine.layout, vectors=(norm,), image_formats=(1, 2))

    async def body(store: TinyStore, address: str) -> None:
        store.knows_vectors = False
        async with Watched(address, layout) as watched:
            store.emit(5)
            await until_async(lambda: watched.directory.is_live)
        (old,) = store.layouts
        assert [target.name for target in old.targets] == [t.name for t in layout.targets]
        assert list(old.image_formats) == [1]
        store.knows_vectors = True
        store.refuse["RegisterLayout"] = grpc.StatusCode.INVALID_ARGUMENT  # for another reason
        async with Watched(address, layout):
            await until_async(lambda: store.refused["RegisterLayout"] > 1)
        assert store.layouts == [old]

    serve(body)


@pytest.mark.parametrize("knows_vectors", [True, False], ids=["0.3.0", "0.2.0"])
def test_a_store_that_has_no_float8_adapters_refuses_their_server_by_name(
    engine: Any, caplog: pytest.LogCaptureFixture, knows_vectors: bool
) -> None:
    norm = Target("model.norm", None, "norm", TargetKind.VECTOR, 0, 8)
    layout = replace(
        engine.layout, vectors=(norm,), image_formats=FLOAT8_FORMATS, adapter_dtype=FLOAT8
    )

    async def body(store: TinyStore, address: str) -> None:
        store.image_formats, store.knows_vectors = (1, 2), knows_vectors
        async with Watched(address, layout) as watched:
            words = "the store is of a release that has no float8 adapters: upgrade it, or leave"
            await until_async(lambda: any(words in each for each in caplog.messages))
            assert not watched.layout_ids
            assert not store.layouts
            store.image_formats, store.knows_vectors = (1, 2, 3), True  # it is upgraded
            await until_async(lambda: watched.layout_ids == [LAYOUT])
        (layout_of_float8,) = store.layouts
        assert layout_of_float8.adapter_dtype == pb.DATA_TYPE_FLOAT8_E4M3
        assert list(layout_of_float8.image_formats) == [3]

    serve(body)


def test_forgotten_layout_is_registered_again(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refuse["WatchAdapters"] = grpc.StatusCode.NOT_FOUND
        async with Watched(address, engine.layout) as watched:
            await until_async(lambda: len(store.layouts) >= 2)
            store.refuse.clear()
            store.emit(5)
            await until_async(lambda: watched.directory.is_live)

    serve(body)


def test_log_of_an_outage_has_the_address(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refuse["RegisterLayout"] = grpc.StatusCode.UNAVAILABLE
        async with Watched(address, engine.layout):
            await until_async(lambda: store.refused["RegisterLayout"] >= 2)
        (line,) = [each for each in caplog.messages if "no connection" in each]
        assert line.startswith(f"no connection to the store at {address}: the adapter store does")

    serve(body)


def test_refused_layout_is_retried(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refuse["RegisterLayout"] = grpc.StatusCode.FAILED_PRECONDITION
        async with Watched(address, engine.layout) as watched:
            await until_async(lambda: store.refused["RegisterLayout"] >= 2)
            assert not watched.layout_ids
            store.refuse.clear()
            await until_async(lambda: watched.layout_ids == [LAYOUT])

    serve(body)


def test_restarted_store_gets_the_layout_and_the_watch_continues(engine: Any) -> None:
    async def main() -> None:
        store, again = TinyStore(), TinyStore(revision=9)
        async with (
            asyncio.timeout(60),
            running(store) as (server, address),
            Watched(address, engine.layout) as watched,
        ):
            store.emit(5)
            await until_async(lambda: watched.directory.is_live)
            store.emit(6, pb.EVENT_KIND_UPDATED, "default/upper")
            await until_async(lambda: watched.directory.revision == 6)
            await server.stop(0)
            await until_async(lambda: not watched.directory.is_live)
            async with running(again, address):
                await until_async(lambda: bool(again.watched_from))
                assert again.watched_from == [6]
                assert len(again.layouts) == 1
                again.emit(9)
                await until_async(lambda: watched.directory.is_live)
                assert watched.layout_ids == [LAYOUT]

    asyncio.run(main())


def test_lost_history_restarts_the_watch_from_now(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "BEHIND_SECONDS", 0.2)

    async def body(store: TinyStore, address: str) -> None:
        async with Watched(address, engine.layout):
            store.emit(5)
            await until_async(lambda: store.watched_from == [5])
            store.revision, store.oldest = 50, 40
            store.events.put_nowait(None)
            await until_async(lambda: store.watched_from == [5, 5, 50])
            store.revision, store.oldest = 3, 0
            store.events.put_nowait(None)
            await until_async(lambda: store.watched_from == [5, 5, 50, 3])

    serve(body)


class Replicated:
    """Two fake stores, told apart by the order in which a client calls them."""

    def __init__(self, stores: list[TinyStore], servers: dict[str, grpc.aio.Server]) -> None:
        self._stores, self._servers = stores, servers
        self.replicas = Replicas.at(*servers)

    def split(self, client: CatalogClient) -> tuple[TinyStore, TinyStore, grpc.aio.Server]:
        """Returns the one called first, the other, and the first one's server."""
        addresses = list(self._servers)
        first = addresses.index(rank(addresses, client._key)[0])
        return self._stores[first], self._stores[1 - first], self._servers[addresses[first]]


def serve_two(body: Callable[[Replicated], Awaitable[Any]]) -> None:
    async def main() -> None:
        stores = [TinyStore(), TinyStore()]
        async with running(stores[0]) as (one, first), running(stores[1]) as (two, second):
            async with asyncio.timeout(60):
                await body(Replicated(stores, {first: one, second: two}))

    asyncio.run(main())


def test_lookups_fail_over_to_another_replica() -> None:
    async def body(stores: Replicated) -> None:
        client = CatalogClient(stores.replicas)
        first, second, server = stores.split(client)
        first.refuse["GetAdapter"] = grpc.StatusCode.UNAVAILABLE
        second.revision = 6
        assert (await client.get_adapter("upper")).revision == 6
        assert sorted(status.is_healthy for status in stores.replicas.statuses()) == [False, True]
        second.refuse["GetAdapter"] = grpc.StatusCode.NOT_FOUND
        with pytest.raises(AdapterNotFound):
            await client.get_adapter("upper")
        await server.stop(0)
        second.refuse["GetAdapter"] = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(StoreUnavailable):
            await client.get_adapter("upper")
        await client.close()

    serve_two(body)


def test_watch_continues_at_another_replica(engine: Any) -> None:
    async def body(stores: Replicated) -> None:
        async with Watched(stores.replicas, engine.layout) as watched:
            first, second, server = stores.split(watched.client)
            first.emit(5)
            await until_async(lambda: watched.directory.is_live)
            first.emit(6, pb.EVENT_KIND_UPDATED, "default/upper")
            await until_async(lambda: watched.directory.revision == 6)
            second.revision = 7
            await server.stop(0)
            await until_async(lambda: second.watched_from == [6])
            assert len(second.layouts) == 1
            second.emit(7, pb.EVENT_KIND_UPDATED, "default/upper")
            await until_async(lambda: watched.directory.revision == 7 and watched.directory.is_live)
            assert watched.layout_ids == [LAYOUT]

    serve_two(body)


def test_replica_that_is_behind_does_not_reset_the_directory(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch waits for one that has the history."""
    monkeypatch.setattr(store_watch, "BEHIND_SECONDS", 60.0)

    async def body(stores: Replicated) -> None:
        async with Watched(stores.replicas, engine.layout) as watched:
            first, second, _ = stores.split(watched.client)
            first.revision = second.revision = 8
            await until_async(lambda: first.watched_from == [5] or first.watched_from == [8])
            first.emit(8)
            await until_async(lambda: watched.directory.revision == 8)
            resets: list[int] = []
            watched.directory.reset = resets.append  # type: ignore[method-assign]
            second.revision = 6
            first.refuse["RegisterLayout"] = grpc.StatusCode.UNAVAILABLE
            first.events.put_nowait(None)  # ends the watch
            await until_async(lambda: len(second.layouts) >= 1)
            second.revision = 8
            await until_async(lambda: second.watched_from == [8])
            second.emit(8)
            await until_async(lambda: watched.directory.is_live)
            assert resets == []

    serve_two(body)


def test_silent_watch_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "SILENCE_SECONDS", 0.5)

    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at(address))
        session = await client.connect()
        store.emit(6, pb.EVENT_KIND_REGISTERED, "default/upper")
        store.emit(7, pb.EVENT_KIND_PINNED, "default/upper")
        store.emit(7)
        events = []
        with pytest.raises(StoreUnavailable, match="silent"):  # noqa: PT012
            async for event in session.watch(5):
                events.append(event)
        # A pin changes the revision and no name.
        assert events == [NameEvent(6, "default/upper"), NameEvent(7), NameEvent(7)]
        store.oldest = 10
        with pytest.raises(HistoryGone):
            await anext(aiter(session.watch(5)))
        await client.close()

    serve(body)
