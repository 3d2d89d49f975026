"""The link to the store: the layout, the watch, and replicas, over real channels."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from inference_svc.errors import (
    AdapterNotFound,
    StoreUnavailable,
)
from inference_svc.store import client as store_client
from inference_svc.store.client import CatalogClient
from inference_svc.store.directory import Directory, NameEvent, Servable
from inference_svc.store.replicas import Replicas, rank
from inference_svc.store.watch import HistoryGone, StoreLink
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.inference_svc.tiny_store import LAYOUT, TinyStore, serve, start, until


class Linked:
    """A directory whose link to the store runs while the block does."""

    def __init__(self, store: str | Replicas, layout: Any) -> None:
        self.client = CatalogClient(Replicas.at(store) if isinstance(store, str) else store)
        self.directory = Directory(self.client, Servable(("base",), 16), 300.0)
        self.layout_ids: list[str] = []
        self.link = StoreLink(self.client, self.directory, layout, self.layout_ids.append)

    async def __aenter__(self) -> "Linked":
        self._task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()


def test_the_layout_is_registered_and_names_are_watched(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        async with Linked(address, engine.layout) as linked:
            store.tell(5)
            await until(lambda: linked.directory.is_live)
            assert linked.layout_ids == [LAYOUT]
            assert linked.directory.layout_id == LAYOUT
            assert store.watched_from == [5]
            store.tell(6, pb.EVENT_KIND_UPDATED, "default/upper")
            store.tell(8)
            await until(lambda: linked.directory.revision == 8)
        (layout,) = store.layouts
        assert (layout.base_model, list(layout.aliases)) == ("base", ["b"])
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


def test_a_refused_layout_is_tried_again_until_it_is_accepted(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refuse["RegisterLayout"] = grpc.StatusCode.FAILED_PRECONDITION
        async with Linked(address, engine.layout) as linked:
            await asyncio.sleep(0.3)
            assert not linked.layout_ids
            store.refuse.clear()
            await until(lambda: linked.layout_ids == [LAYOUT])

    serve(body)


def test_a_store_that_comes_back_gets_the_layout_and_continues_the_watch(engine: Any) -> None:
    async def main() -> None:
        store = TinyStore()
        server, port = await start(store, "127.0.0.1:0")
        async with asyncio.timeout(20), Linked(f"127.0.0.1:{port}", engine.layout) as linked:
            store.tell(5)
            await until(lambda: linked.directory.is_live)
            store.tell(6, pb.EVENT_KIND_UPDATED, "default/upper")
            await until(lambda: linked.directory.revision == 6)
            await server.stop(0)
            await until(lambda: not linked.directory.is_live)
            again = TinyStore(revision=9)
            server, _ = await start(again, f"127.0.0.1:{port}")
            await until(lambda: bool(again.watched_from))
            assert again.watched_from == [6]
            assert len(again.layouts) == 1
            again.tell(9)
            await until(lambda: linked.directory.is_live)
            assert linked.layout_ids == [LAYOUT]
        await server.stop(0)

    asyncio.run(main())


def test_history_that_is_gone_or_began_anew_starts_from_now(engine: Any) -> None:
    async def body(store: TinyStore, address: str) -> None:
        async with Linked(address, engine.layout) as linked:
            store.tell(5)
            await until(lambda: linked.directory.is_live)
            store.revision, store.oldest = 50, 40
            store.events.put_nowait(None)
            await until(lambda: store.watched_from == [5, 5, 50])
            store.revision, store.oldest = 3, 0
            store.events.put_nowait(None)
            await until(lambda: store.watched_from == [5, 5, 50, 3])

    serve(body)


class Replicated:
    """Two stores of a few lines, told apart by the order in which a client asks them."""

    def __init__(self, stores: list[TinyStore], servers: dict[str, grpc.aio.Server]) -> None:
        self._stores, self._servers = stores, servers
        self.replicas = Replicas.at(*servers)

    def split(self, client: CatalogClient) -> tuple[TinyStore, TinyStore, grpc.aio.Server]:
        """The one asked first, the other, and the first one's server."""
        addresses = list(self._servers)
        first = addresses.index(rank(addresses, client._key)[0])
        return self._stores[first], self._stores[1 - first], self._servers[addresses[first]]


def serve_two(body: Callable[[Replicated], Awaitable[Any]]) -> None:
    async def main() -> None:
        stores, servers = [TinyStore(), TinyStore()], {}
        for store in stores:
            server, port = await start(store, "127.0.0.1:0")
            servers[f"127.0.0.1:{port}"] = server
        try:
            async with asyncio.timeout(30):
                await body(Replicated(stores, servers))
        finally:
            await asyncio.gather(*(server.stop(0) for server in servers.values()))

    asyncio.run(main())


def test_names_are_asked_of_whichever_replica_answers() -> None:
    async def body(stores: Replicated) -> None:
        client = CatalogClient(stores.replicas)
        first, second, server = stores.split(client)
        first.refuse["GetAdapter"] = grpc.StatusCode.UNAVAILABLE
        second.revision = 6
        assert (await client.get_adapter("upper")).revision == 6
        assert sorted(status.is_in for status in stores.replicas.statuses()) == [False, True]
        second.refuse["GetAdapter"] = grpc.StatusCode.NOT_FOUND
        with pytest.raises(AdapterNotFound):
            await client.get_adapter("upper")
        await server.stop(0)
        second.refuse["GetAdapter"] = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(StoreUnavailable):
            await client.get_adapter("upper")
        await client.close()

    serve_two(body)


def test_the_watch_goes_on_at_another_replica_at_its_revision(engine: Any) -> None:
    async def body(stores: Replicated) -> None:
        async with Linked(stores.replicas, engine.layout) as linked:
            first, second, server = stores.split(linked.client)
            first.tell(5)
            await until(lambda: linked.directory.is_live)
            first.tell(6, pb.EVENT_KIND_UPDATED, "default/upper")
            await until(lambda: linked.directory.revision == 6)
            second.revision = 7
            await server.stop(0)
            await until(lambda: second.watched_from == [6])
            assert len(second.layouts) == 1
            second.tell(7, pb.EVENT_KIND_UPDATED, "default/upper")
            await until(lambda: linked.directory.revision == 7 and linked.directory.is_live)
            assert linked.layout_ids == [LAYOUT]

    serve_two(body)


def test_a_replica_that_is_behind_is_not_followed_into_the_past(engine: Any) -> None:
    """What is known stays known; the watch waits for the one that has the history."""

    async def body(stores: Replicated) -> None:
        async with Linked(stores.replicas, engine.layout) as linked:
            first, second, _ = stores.split(linked.client)
            first.revision = second.revision = 8
            await until(lambda: first.watched_from == [5] or first.watched_from == [8])
            first.tell(8)
            await until(lambda: linked.directory.revision == 8)
            resets: list[int] = []
            linked.directory.reset = resets.append  # type: ignore[method-assign]
            second.revision = 6
            first.refuse["RegisterLayout"] = grpc.StatusCode.UNAVAILABLE
            first.events.put_nowait(None)  # ends the watch
            await until(lambda: len(second.layouts) >= 1)
            second.revision = 8
            await until(lambda: second.watched_from == [8])
            second.tell(8)
            await until(lambda: linked.directory.is_live)
            assert resets == []

    serve_two(body)


def test_a_watch_that_falls_silent_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "SILENCE_SECONDS", 0.1)

    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at(address))
        session = await client.connect()
        store.tell(6, pb.EVENT_KIND_REGISTERED, "default/upper")
        store.tell(7, pb.EVENT_KIND_PINNED, "default/upper")
        store.tell(7)
        events = []
        with pytest.raises(StoreUnavailable, match="silent"):  # noqa: PT012
            async for event in session.watch(5):
                events.append(event)
        # A pin changes no name, and yet the revision.
        assert events == [NameEvent(6, "default/upper"), NameEvent(7), NameEvent(7)]
        store.oldest = 10
        with pytest.raises(HistoryGone):
            await anext(aiter(session.watch(5)))
        await client.close()

    serve(body)
