"""The asyncio client: the same behaviour as the blocking one, on its own streams and retries."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest

from loadout import AsyncClient, Client, errors, types
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from tests.support.wait import TIMEOUT_S, until_async


@pytest.fixture
def run(store_server, inference_server, quick_retry):
    """Runs `body(client)` in a fresh event loop with a client of both servers."""

    def run(body: Callable[[AsyncClient], Awaitable[object]]) -> object:
        async def main():
            addresses = {"store": store_server.address, "inference": inference_server.address}
            async with AsyncClient(**addresses, timeout_s=20, retry=quick_retry) as client:
                return await body(client)

        return asyncio.run(main())

    return run


def test_same_public_methods_and_parameters():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    for name in public(Client) | {"__init__"}:
        blocking = inspect.signature(getattr(Client, name)).parameters
        assert blocking == inspect.signature(getattr(AsyncClient, name)).parameters, name


def test_register_uploads(run, fake_store, fail, adapter_folder):
    answer = store_pb.UploadAdapterResponse(revision=2)
    fake_store.on("UploadAdapter", fail(grpc.StatusCode.UNAVAILABLE), answer)
    assert run(lambda client: client.register("a", adapter_folder)).revision == 2
    first, second = fake_store.requests["UploadAdapter"]
    assert first == second
    assert len(first) == 5


def test_unreadable_file_is_raised_as_it_is(run, fake_store, adapter_folder):
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse())

    def vanish(sent, total):
        (adapter_folder / "adapter_model.safetensors").unlink(missing_ok=True)

    with pytest.raises(FileNotFoundError):
        run(lambda client: client.register("a", adapter_folder, progress=vanish))


def test_register_by_uri_and_list(run, fake_store, registered):
    fake_store.on("RegisterAdapter", registered)
    pages = [
        store_pb.ListAdaptersResponse(adapters=[store_pb.Adapter(name="a")], next_page_token="t"),
        store_pb.ListAdaptersResponse(adapters=[store_pb.Adapter(name="b")]),
    ]
    fake_store.on("ListAdapters", *pages)

    async def body(client):
        assert (await client.register("a", "s3://b/p")).revision == 41
        return [adapter.name async for adapter in client.list()]

    assert run(body) == ["a", "b"]


def test_many_generations_at_once(run, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))

    async def body(client):
        return await asyncio.gather(*(client.complete("hi", max_tokens=3) for _ in range(20)))

    assert {each.text for each in run(body)} == {"hey"}


@pytest.fixture
def endless(fake_inference, chunks):
    def behave(request, context):
        yield chunks[0]
        while context.is_active():
            time.sleep(0.01)

    fake_inference.on("Generate", behave)
    return fake_inference


def test_break_cancels(run, endless):
    async def body(client):
        async for chunk in client.generate("hi"):
            assert chunk.text == "he"
            break
        return await asyncio.to_thread(endless.cancelled.wait, TIMEOUT_S)

    assert run(body)


def test_close_cancels_and_ends_the_iteration(run, endless):
    async def body(client):
        async with client.generate("hi") as stream:
            await anext(stream)
        assert await asyncio.to_thread(endless.cancelled.wait, TIMEOUT_S)
        return [chunk async for chunk in stream]

    assert run(body) == []


def test_close_from_another_task_ends_the_iteration(run, endless):
    async def body(client):
        stream = client.generate("hi")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.1, stream.close)
        return [chunk async for chunk in stream]

    assert run(body) == []


def test_cancelling_the_task_cancels_the_rpc(run, endless):
    async def body(client):
        task = asyncio.create_task(client.complete("hi"))
        await until_async(lambda: "Generate" in endless.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(endless.cancelled.wait, TIMEOUT_S)

    assert run(body)


def test_deadline(run, endless):
    with pytest.raises(errors.DeadlineExceeded):
        run(lambda client: client.complete("hi", timeout_s=0.3))


def test_server_killed_mid_stream_is_lost(run, endless, inference_server):
    async def body(client):
        stream = client.generate("hi")
        await anext(stream)
        threading.Thread(target=inference_server.kill).start()
        with pytest.raises(errors.StreamLost):
            await anext(stream)
        return [chunk async for chunk in stream]

    assert run(body) == []


def test_queue_full_and_lost_before_the_first_response(run, fake_inference, fail, chunks):
    full = fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.2)
    lost = fail(grpc.StatusCode.INTERNAL)
    fake_inference.on("Generate", full, lost, lambda request, context: iter(chunks))
    started = time.monotonic()
    assert run(lambda client: client.complete("hi")).finish_reason is types.FinishReason.STOP
    assert time.monotonic() - started >= 0.2


def test_watch_resumes(run, fake_store, fail):
    def event(revision):
        inner = store_pb.AdapterEvent(revision=revision)
        return store_pb.WatchAdaptersResponse(event=inner)

    def first(request, context):
        yield event(6)
        fail(grpc.StatusCode.UNAVAILABLE)(request, context)

    fake_store.on("WatchAdapters", first, lambda request, context: iter([event(7)]))

    async def body(client):
        return [each.revision async for each in client.watch(5)]

    assert run(body) == [6, 7]
    assert [r.since_revision for r in fake_store.requests["WatchAdapters"]] == [5, 6]


def test_unary_errors_and_retries(run, fake_store, fail):
    answer = store_pb.GetAdapterResponse(adapter=store_pb.Adapter(rank=4))
    missing = fail(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "a")
    fake_store.on("GetAdapter", fail(grpc.StatusCode.UNKNOWN), answer, missing)

    async def body(client):
        assert (await client.get("a")).rank == 4
        with pytest.raises(errors.NotFound) as caught:
            await client.get("a")
        return caught.value.subject

    assert run(body) == "a"


def test_complete_without_its_end_is_lost(run, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks[:1]))
    with pytest.raises(errors.StreamLost, match="without its last response"):
        run(lambda client: client.complete("hi"))
