"""The store's client over real channels, against a store of a few lines."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from inference_svc import store_client
from inference_svc.adapters.store import ImageChunk, ImageHeader, ImageTrailer, LayerEnd, Segment
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    InferenceError,
    StoreUnavailable,
)
from inference_svc.name_cache import AdapterRecord, LayoutVerdict
from inference_svc.names import Directory, NameEvent, Servable
from inference_svc.replicas import Replicas, rank
from inference_svc.store_client import CatalogClient, ImageClient
from inference_svc.store_link import HistoryGone, StoreLink
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

A = "sha256:" + "a" * 64
LAYOUT = "sha256:" + "1" * 64


@dataclass
class TinyStore(pb_grpc.AdapterStoreServiceServicer):
    """Answers from memory. `refuse` maps a method to the code that it answers with."""

    revision: int = 5
    oldest: int = 0
    layouts: list[pb.ModelLayout] = field(default_factory=list)
    watched_from: list[int] = field(default_factory=list)
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    refuse: dict[str, grpc.StatusCode] = field(default_factory=dict)
    messages: list[pb.PullAdapterResponse] = field(default_factory=list)
    hang: bool = False
    pulls_ended: int = 0

    async def _check(self, method: str, context: Any) -> None:
        if method in self.refuse:
            await context.abort(self.refuse[method], "refused, because")

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check("GetAdapter", context)
        adapter = pb.Adapter(name="default/upper", version=2, digest=A, rank=8, base_model="base")
        adapter.layout_states.add(layout_id="x", state=pb.IMAGE_STATE_PENDING)
        adapter.layout_states.add(
            layout_id=LAYOUT, state=pb.IMAGE_STATE_INCOMPATIBLE, reason="too wide"
        )
        return pb.GetAdapterResponse(adapter=adapter, revision=self.revision)

    async def GetStoreStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetStoreStatusResponse(revision=self.revision)

    async def RegisterLayout(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check("RegisterLayout", context)
        self.layouts.append(request.layout)
        return pb.RegisterLayoutResponse(layout_id=LAYOUT, image_format=1)

    async def WatchAdapters(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.watched_from.append(request.since_revision)
        if request.since_revision < self.oldest:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "list again")
        while (event := await self.events.get()) is not None:
            yield pb.WatchAdaptersResponse(event=event)

    async def PullAdapter(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            for message in self.messages:
                yield message
            if self.hang:
                await asyncio.sleep(60)
            await self._check("PullAdapter", context)
        finally:
            self.pulls_ended += 1

    def tell(self, revision: int, kind: int = pb.EVENT_KIND_BOOKMARK, name: str = "") -> None:
        self.events.put_nowait(pb.AdapterEvent(revision=revision, kind=kind, name=name))


def serve(body: Callable[[TinyStore, str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        store = TinyStore()
        server, port = await start(store, "127.0.0.1:0")
        async with asyncio.timeout(20):
            result = await body(store, f"127.0.0.1:{port}")
        await server.stop(0)
        return result

    return asyncio.run(main())


async def start(store: TinyStore, address: str) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_AdapterStoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


# --- catalog ------------------------------------------------------------------------------------


def test_get_adapter_says_what_the_store_knows() -> None:
    async def body(store: TinyStore, address: str) -> AdapterRecord:
        client = CatalogClient(Replicas.at(address))
        try:
            return await client.get_adapter("upper")
        finally:
            await client.close()

    assert serve(body) == AdapterRecord(
        "default/upper",
        2,
        A,
        rank=8,
        base_model="base",
        revision=5,
        verdicts={"x": LayoutVerdict(True), LAYOUT: LayoutVerdict(False, "too wide")},
    )


CODES = [
    ("NOT_FOUND", AdapterNotFound),
    ("FAILED_PRECONDITION", AdapterUnusable),
    ("DATA_LOSS", CorruptImage),
    *((code, StoreUnavailable) for code in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")),
]


@pytest.mark.parametrize(("code", "error"), CODES)
def test_codes_become_our_errors(code: str, error: type[InferenceError]) -> None:
    """Unary and streamed, the message kept."""

    async def body(store: TinyStore, address: str) -> None:
        store.refuse = dict.fromkeys(("GetAdapter", "PullAdapter"), grpc.StatusCode[code])
        client, images = CatalogClient(Replicas.at(address)), ImageClient(Replicas.at(address))
        said = code if error is StoreUnavailable else "refused, because"
        with pytest.raises(error, match=said):
            await client.get_adapter("upper")
        with pytest.raises(error, match=said):
            await asyncio.to_thread(list, images.pull(A, LAYOUT))
        await client.close()
        images.close()

    serve(body)


def test_an_address_where_nobody_listens_is_unavailable() -> None:
    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at("127.0.0.1:1"))
        with pytest.raises(StoreUnavailable) as caught:
            await client.get_adapter("upper")
        assert "127.0.0.1" not in caught.value.message, "callers do not learn our addresses"
        assert "127.0.0.1" in caught.value.__notes__[0], "our log does"
        await client.close()

    serve(body)


# --- pull ---------------------------------------------------------------------------------------


def messages() -> list[pb.PullAdapterResponse]:
    header = pb.ImageHeader(
        image_id="image",
        digest=A,
        layout_id=LAYOUT,
        image_format=1,
        total_bytes=512,
        segments=[
            pb.Segment(target=1, kind=pb.SEGMENT_KIND_A, rank=4, offset=0, length_bytes=64),
            pb.Segment(target=1, kind=pb.SEGMENT_KIND_B, rank=4, offset=256, length_bytes=32),
        ],
    )
    return [
        pb.PullAdapterResponse(header=header),
        pb.PullAdapterResponse(chunk=pb.ImageChunk(offset=0, data=b"x" * 512)),
        pb.PullAdapterResponse(layer_end=pb.LayerEnd(part=0, end_offset=512, sha256=b"s")),
        pb.PullAdapterResponse(trailer=pb.ImageTrailer(sha256=b"t")),
    ]


def test_pull_yields_the_images_messages() -> None:
    async def body(store: TinyStore, address: str) -> list[Any]:
        store.messages = messages()
        images = ImageClient(Replicas.at(address))
        got = await asyncio.to_thread(list, images.pull(A, LAYOUT))
        images.close()
        return got

    segments = (Segment(1, "a", 4, 0, 64), Segment(1, "b", 4, 256, 32))
    assert serve(body) == [
        ImageHeader("image", A, LAYOUT, 1, 512, segments),
        ImageChunk(0, b"x" * 512),
        LayerEnd(0, 512, b"s"),
        ImageTrailer(b"t"),
    ]


def test_large_messages_pass() -> None:
    async def body(store: TinyStore, address: str) -> int:
        data = bytes(16 << 20)
        store.messages = [pb.PullAdapterResponse(chunk=pb.ImageChunk(offset=0, data=data))]
        images = ImageClient(Replicas.at(address))
        (chunk,) = await asyncio.to_thread(list, images.pull(A, LAYOUT))
        images.close()
        return len(chunk.data)

    assert serve(body) == 16 << 20


def test_cancel_from_another_thread_ends_a_waiting_pull() -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.messages, store.hang = messages()[:1], True
        images = ImageClient(Replicas.at(address))
        stream = images.pull(A, LAYOUT)
        opened = threading.Event()

        def read() -> None:
            for _message in stream:
                opened.set()

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            await asyncio.to_thread(opened.wait, 5)
            began_s = time.monotonic()
            stream.cancel()
            with pytest.raises(StoreUnavailable):
                await asyncio.wrap_future(reading)
            assert time.monotonic() - began_s < 2
        await until(lambda: store.pulls_ended == 1)
        images.close()

    serve(body)


def test_leaving_a_pull_early_ends_it_at_the_store() -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.messages, store.hang = messages()[:2], True
        images = ImageClient(Replicas.at(address))

        def read_one() -> None:
            for _message in images.pull(A, LAYOUT):
                return

        await asyncio.to_thread(read_one)
        await until(lambda: store.pulls_ended == 1)
        images.close()

    serve(body)


def test_a_store_that_lost_our_layout_is_worth_a_retry() -> None:
    """NOT_FOUND about the layout is not about the adapter."""

    class Forgetful(TinyStore):
        async def PullAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
            info = error_details_pb2.ErrorInfo(reason="NOT_FOUND")
            info.metadata["subject"] = request.layout_id
            status = status_pb2.Status(code=5, message="no layout")
            status.details.add().Pack(info)
            await context.abort_with_status(rpc_status.to_status(status))
            yield

    async def main() -> None:
        server, port = await start(Forgetful(), "127.0.0.1:0")
        images = ImageClient(Replicas.at(f"127.0.0.1:{port}"))
        with pytest.raises(StoreUnavailable, match="does not know our layout"):
            await asyncio.to_thread(list, images.pull(A, LAYOUT))
        images.close()
        await server.stop(0)

    asyncio.run(main())


# --- the link -----------------------------------------------------------------------------------


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


# --- replicas -----------------------------------------------------------------------------------


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
