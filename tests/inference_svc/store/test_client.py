"""The store's client over real channels, against a fake store."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from contract.images.header import ImageChunk, ImageHeader, ImageTrailer, LayerEnd, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    NoRoom,
    QueueFull,
    StoreUnavailable,
)
from inference_svc.store.client import CatalogClient, ImageClient
from inference_svc.store.credentials import StoreAccess, TokenFile
from inference_svc.store.replicas import Replicas
from inference_svc.store.types import AdapterRecord, LayoutVerdict, Registered, Source
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument, PermissionDenied, ServiceError, Unauthenticated
from tests.inference_svc.tiny_store import LAYOUT, A, TinyStore, running, serve
from tests.support.wait import until_async


def test_get_adapter_returns_the_record() -> None:
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
def test_codes_become_errors(code: str, error: type[ServiceError]) -> None:
    """Unary and streamed, the message kept."""

    async def body(store: TinyStore, address: str) -> None:
        store.refuse = dict.fromkeys(("GetAdapter", "PullAdapter"), grpc.StatusCode[code])
        client, images = CatalogClient(Replicas.at(address)), ImageClient(Replicas.at(address))
        text = code if error is StoreUnavailable else "refused, because"
        with pytest.raises(error, match=text):
            await client.get_adapter("upper")
        with pytest.raises(error, match=text):
            await asyncio.to_thread(list, images.pull(A, LAYOUT))
        await client.close()
        images.close()

    serve(body)


def test_outage_is_logged_once_with_the_address(caplog: pytest.LogCaptureFixture) -> None:
    """Callers are told that the server's log has it."""

    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at(address))
        for _ in range(2):
            store.refuse["GetAdapter"] = grpc.StatusCode.UNAVAILABLE
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await client.get_adapter("upper")
            del store.refuse["GetAdapter"]
            await client.get_adapter("upper")
        logged = [record for record in caplog.records if "call to the store" in record.message]
        assert [(record.source, record.notes) for record in logged] == [
            (address, "refused, because")
        ] * 2
        await client.close()

    serve(body)


def test_adapters_are_listed_page_by_page_for_tenants() -> None:
    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at(address))
        page = await client.list_adapters({"b", "a"}, 5, "")
        assert [record.name for record in page.records] == ["a/first", "b/first"]
        assert page.records[0].revision == 5
        last = await client.list_adapters({"a"}, 5, page.next_token)
        assert [record.name for record in last.records] == ["a/second"]
        assert last.next_token == ""
        store.refuse["ListAdapters"] = grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(InvalidArgument):
            await client.list_adapters({"a"}, 5, "x")
        await client.close()

    serve(body)


def test_register_sends_the_callers_token_and_not_ours(tmp_path: Path) -> None:
    own = tmp_path / "token"
    own.write_text("ours")

    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at(address), StoreAccess(TokenFile(own)))
        made = await client.register("t/n", Source("file:///x", "base"), "theirs")
        assert made == Registered(
            *(5, "org/base", "the only one", ("note",)), ("q_proj: too large",)
        )
        await client.register("t/n", Source("file:///x"), None)
        (first, metadata), (_, without) = store.registered
        assert (first.name, first.source_uri, first.base_model) == ("t/n", "file:///x", "base")
        assert metadata["authorization"] == "Bearer theirs"
        assert "authorization" not in without
        await client.close()

    serve(body)


@pytest.mark.parametrize(
    ("code", "details", "error", "subject", "retry_after_s"),
    [
        ("UNAUTHENTICATED", [], Unauthenticated, "", 0),
        ("PERMISSION_DENIED", [], PermissionDenied, "", 0),
        ("INVALID_ARGUMENT", ["source_uri"], InvalidArgument, "source_uri", 0),
        ("FAILED_PRECONDITION", [], AdapterUnusable, "", 0),
        ("RESOURCE_EXHAUSTED", [1.5], QueueFull, "", 1.5),
        ("RESOURCE_EXHAUSTED", [], NoRoom, "", 0),
        ("UNAVAILABLE", [], StoreUnavailable, "", 0),
    ],
)
def test_refusal_of_a_caller_does_not_eject_the_replica(
    code: str, details: list[Any], error: type[ServiceError], subject: str, retry_after_s: float
) -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refusal = status_pb2.Status(code=grpc.StatusCode[code].value[0], message="because")
        for detail in details:
            store.refusal.details.add().Pack(_packed(detail))
        replicas = Replicas.at(address)
        client = CatalogClient(replicas)
        with pytest.raises(error, match="the adapter store: because") as caught:
            await client.register("t/n", Source("file:///x"), "theirs")
        assert (caught.value.subject, caught.value.retry_after_s) == (subject, retry_after_s)
        assert all(each.is_healthy for each in replicas.statuses())
        await client.close()

    serve(body)


def _packed(detail: Any) -> Any:
    if isinstance(detail, str):
        violation = error_details_pb2.BadRequest.FieldViolation(field=detail)
        return error_details_pb2.BadRequest(field_violations=[violation])
    return error_details_pb2.RetryInfo(retry_delay={"seconds": 1, "nanos": 500_000_000})


def test_unanswered_registration_is_unavailable() -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.refuse["RegisterAdapter"] = grpc.StatusCode.UNAVAILABLE
        client = CatalogClient(Replicas.at(address))
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await client.register("t/n", Source("file:///x"), "theirs")
        await client.close()

    serve(body)


def test_unreachable_address_is_unavailable() -> None:
    async def body(store: TinyStore, address: str) -> None:
        client = CatalogClient(Replicas.at("127.0.0.1:1"))
        with pytest.raises(StoreUnavailable) as caught:
            await client.get_adapter("upper")
        assert "127.0.0.1" not in caught.value.message, "callers do not learn our addresses"
        assert "127.0.0.1" in caught.value.__notes__[0], "our log does"
        await client.close()

    serve(body)


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


def test_pull_yields_messages() -> None:
    async def body(store: TinyStore, address: str) -> list[Any]:
        store.messages = messages()
        images = ImageClient(Replicas.at(address))
        got = await asyncio.to_thread(list, images.pull(A, LAYOUT))
        images.close()
        return got

    segments = (Segment(1, SegmentKind.A, 4, 0, 64), Segment(1, SegmentKind.B, 4, 256, 32))
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


def test_cancel_ends_a_waiting_pull() -> None:
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
            stream.cancel()
            with pytest.raises(StoreUnavailable):
                await asyncio.wrap_future(reading)
        await until_async(lambda: store.pulls_ended == 1)
        images.close()

    serve(body)


def test_abandoned_pull_ends_at_the_store() -> None:
    async def body(store: TinyStore, address: str) -> None:
        store.messages, store.hang = messages()[:2], True
        images = ImageClient(Replicas.at(address))

        def read_one() -> None:
            for _message in images.pull(A, LAYOUT):
                return

        await asyncio.to_thread(read_one)
        await until_async(lambda: store.pulls_ended == 1)
        images.close()

    serve(body)


def test_store_that_lost_the_layout_is_unavailable() -> None:
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
        async with running(Forgetful()) as (_, address):
            images = ImageClient(Replicas.at(address))
            with pytest.raises(StoreUnavailable, match="the model that this server runs"):
                await asyncio.to_thread(list, images.pull(A, LAYOUT))
            images.close()

    asyncio.run(main())
