"""What nobody reads is counted until it is sent or its reader has gone, and no handler waits long
for a reader."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from typing import Any

import grpc
import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from servicekit.pace import Pace
from servicekit.rpc import interceptor, places
from servicekit.rpc.interceptor import CallRules
from servicekit.rpc.requests import RequestBounds
from servicekit.shares import Shares
from tests.servicekit.rpc.served import ACCOUNT, call_places, serving
from tests.support.servers.http2 import Connection, message

MIB = 1 << 20
RULES = CallRules(
    "test.domain",
    requests={
        "Get": RequestBounds(BytesValue, answer_bytes=2 * MIB),
        "Stream": RequestBounds(BytesValue, answer_bytes=2 * MIB),
        "Slow": RequestBounds(BytesValue, max_running=2),
    },
)
SMALL = message(b"")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def large(request: Any, context: Any) -> bytes:
    return bytes(MIB)


def unread(stack: ExitStack, address: str, path: str, num_calls: int) -> Connection:
    """Makes calls whose answers have no room in the caller's window."""
    connection = stack.enter_context(Connection(address))
    for _ in range(num_calls):
        connection.send(connection.call(path, **{ACCOUNT: "slow"}), SMALL, end=True)
    return connection


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_unread_answers_take_their_accounts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MiB an account may have 4: two answers and their copies."""
    monkeypatch.setattr(places, "PLACE_SECONDS", 0.05)

    async def main() -> None:
        held = call_places(answer_bytes=8 * MIB)
        handlers = {"Get": grpc.unary_unary_rpc_method_handler(large)}
        async with serving(RULES, held, handlers) as address:
            with ExitStack() as stack:
                await asyncio.to_thread(unread, stack, address, "/test.Service/Get", 5)
                await until(lambda: held.answer_bytes.used_by("slow") == 4 * MIB)
                async with grpc.aio.insecure_channel(address) as channel:
                    get = channel.unary_unary("/test.Service/Get")
                    refused = await code_of(get(b"", metadata=((ACCOUNT, "slow"),)))
                    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert len(await get(b"", metadata=((ACCOUNT, "quick"),))) == MIB
                assert held.answer_bytes.used_by("slow") == 4 * MIB
            await until(lambda: held.answer_bytes.used == 0)

    asyncio.run(main())


@pytest.mark.parametrize("yields", [False, True])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_stream_ends_whose_reader_stalls(yields: bool, num_before: int) -> None:
    """Its handler lets go of everything, while what gRPC still keeps is counted."""
    running = 0

    async def stream(request: Any, context: Any) -> AsyncGenerator[bytes]:
        nonlocal running
        running += 1
        try:
            for size in [10] * num_before + [MIB] * 10:
                yield bytes(size)
        finally:
            running -= 1

    async def write(request: Any, context: Any) -> None:
        async with aclosing(stream(request, context)) as responses:
            async for each in responses:
                await context.write(each)

    async def main() -> list[str]:
        codes: list[str] = []
        held = call_places(pace=Pace(64 << 10, 0.2))
        handler = grpc.unary_stream_rpc_method_handler(stream if yields else write)
        ended = serving(RULES, held, {"Stream": handler}, lambda end: codes.append(end.reason))
        async with ended as address:
            with ExitStack() as stack:
                await asyncio.to_thread(unread, stack, address, "/test.Service/Stream", 3)
                await until(lambda: len(codes) == 3)
                assert running == 0
                assert held.request_bytes.used == 0
                assert held.answer_bytes.used_by("slow") == 6 * MIB
            await until(lambda: held.answer_bytes.used == 0)
        return codes

    assert asyncio.run(main()) == ["READER_STALLED"] * 3


def test_a_reader_that_stalled_learns_why() -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(MIB)

    async def main() -> grpc.StatusCode:
        held = call_places(pace=Pace(64 << 10, 0.2))
        ends: list[str] = []
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
        async with (
            serving(RULES, held, handlers, lambda end: ends.append(end.reason)) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = channel.unary_stream("/test.Service/Stream")(b"")
            await call.read()
            await until(lambda: bool(ends))

            async def read_on() -> None:
                while True:
                    await call.read()

            return await code_of(read_on())

    assert asyncio.run(main()) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_large_message_takes_more_while_it_is_sent() -> None:
    """gRPC's copy included; behind it its place is the usual one again."""

    async def write(request: Any, context: Any) -> None:
        await context.write(bytes(3 * MIB))
        assert held.answer_bytes.used == 2 * MIB
        await context.write(bytes(10))

    async def main() -> None:
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(write)}
        async with serving(RULES, held, handlers) as address:
            with ExitStack() as stack:
                await asyncio.to_thread(unread, stack, address, "/test.Service/Stream", 1)
                await until(lambda: held.answer_bytes.used == 6 * MIB)
            async with grpc.aio.insecure_channel(address) as channel:
                call = channel.unary_stream("/test.Service/Stream")(b"")
                assert [len(each) async for each in call] == [3 * MIB, 10]

    held = call_places(answer_bytes=16 * MIB, share=1.0)
    asyncio.run(main())


@pytest.mark.parametrize("size", [60 << 10, MIB])
def test_a_message_is_let_go_with_its_call(size: int) -> None:
    """Whether it is accepted or too large; not once a collection of cycles finds it."""
    kept: list[int] = []

    async def get(request: Any, context: Any) -> bytes:
        return b""

    def call(address: str) -> None:
        body = message(b"\x0a" + bytes(_VarintBytes(size)) + bytes(size))
        with Connection(address) as connection:
            connection.receive(1)
            for _ in range(10):
                stream = connection.call("/test.Service/Get")
                connection.send(stream, body, end=True)
                while stream not in connection.ended:
                    connection.receive(1)

    async def main() -> None:
        handlers = {"Get": grpc.unary_unary_rpc_method_handler(get)}
        async with serving(RULES, call_places(), handlers) as address:
            await asyncio.to_thread(call, address)  # what is kept for ever is kept now
            gc.disable()
            tracemalloc.start()
            try:
                await asyncio.to_thread(call, address)
                kept.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
                gc.enable()

    asyncio.run(main())
    assert kept[0] < 10 * size / 2


def test_only_so_many_calls_of_an_account_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two places an account has one; the others of its calls are refused in time."""
    monkeypatch.setattr(places, "PLACE_SECONDS", 0.05)

    async def main() -> None:
        release, is_running = asyncio.Event(), asyncio.Event()

        async def slow(request: Any, context: Any) -> bytes:
            is_running.set()
            await release.wait()
            return b""

        handlers = {"Slow": grpc.unary_unary_rpc_method_handler(slow)}
        async with (
            serving(RULES, call_places(), handlers) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = channel.unary_unary("/test.Service/Slow")
            first = call(b"", metadata=((ACCOUNT, "a"),))
            await is_running.wait()
            second = await code_of(call(b"", metadata=((ACCOUNT, "a"),)))
            assert second is grpc.StatusCode.RESOURCE_EXHAUSTED
            other = call(b"", metadata=((ACCOUNT, "b"),))
            await asyncio.sleep(0)
            release.set()
            assert await first == await other == b""

    asyncio.run(main())


def test_reflection_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PLACE_SECONDS", 0.05)

    async def main() -> None:
        def add(server: grpc.aio.Server) -> None:
            reflection.enable_server_reflection(("test.Service",), server)

        async with (
            serving(RULES, call_places(), {}, add=add) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            ask = ServerReflectionStub(channel).ServerReflectionInfo
            request = ServerReflectionRequest(list_services="")
            streams = [ask(metadata=((ACCOUNT, "a"),)) for _ in range(8)]
            for stream in streams:
                await stream.write(request)
                answer = await stream.read()
                assert answer.list_services_response.service[0].name == "test.Service"
            assert interceptor.REFLECTION.max_running == 2 * len(streams)
            refused = await code_of(ask([request], metadata=((ACCOUNT, "a"),)).read())
            assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await ask([request], metadata=((ACCOUNT, "b"),)).read()
            long = ServerReflectionRequest(file_by_filename="x" * 70_000)
            code = await code_of(ask([long], metadata=((ACCOUNT, "b"),)).read())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


def test_a_place_is_had_at_once_or_in_turn() -> None:
    """`wait` of Shares passes nobody of its own account."""

    async def main() -> list[str]:
        shares, order = Shares("bytes", 10), []
        first = await shares.wait("a", 6, 1)

        async def take(amount: int, name: str) -> None:
            with await shares.wait("a", amount, 5):
                order.append(name)

        tasks = [asyncio.create_task(take(8, "large")), asyncio.create_task(take(2, "small"))]
        for _ in range(5):
            await asyncio.sleep(0)
        first.shrink(9)
        assert shares.used == 6
        first.shrink(1)
        assert shares.used == 9
        first.release()
        await asyncio.gather(*tasks)
        assert shares.used == 0
        shares.check_integrity()
        return order

    assert asyncio.run(main()) == ["large", "small"]
