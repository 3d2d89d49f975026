"""Health checks are answered whatever callers without a token do, and hold little of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from servicekit.rpc import health
from servicekit.rpc.health import Health

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


def serve(action: Callable[[Health, grpc.aio.Channel], Awaitable[Any]]) -> Any:
    """Runs `action` with a served Health of the service "our.Service"."""

    async def main() -> Any:
        server = grpc.aio.server()
        served = Health(("our.Service",), lambda: (("x-load", "1"),))
        served.add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await action(served, channel)
        finally:
            await server.stop(0)

    return asyncio.run(main())


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


def test_check_says_whether_the_server_serves() -> None:
    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        check = HealthStub(channel).Check
        served.set_serving(True)
        call = check(HealthCheckRequest(service="our.Service"))
        assert (await call).status == SERVING
        assert dict(await call.trailing_metadata())["x-load"] == "1"
        assert await refusal(check(HealthCheckRequest(service="x"))) is grpc.StatusCode.NOT_FOUND
        served.announce_end()
        served.set_serving(True)
        assert (await check(HealthCheckRequest())).status == NOT_SERVING

    serve(action)


def test_watch_sends_each_change() -> None:
    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        served.set_serving(True)
        assert (await watch.read()).status == SERVING
        unknown = HealthStub(channel).Watch(HealthCheckRequest(service="x"))
        assert (await unknown.read()).status == HealthCheckResponse.SERVICE_UNKNOWN

    serve(action)


def test_watches_are_few_and_their_places_come_back() -> None:
    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        stub = HealthStub(channel)
        watches = [stub.Watch(HealthCheckRequest()) for _ in range(health.MAX_WATCHES_OF_PEER)]
        for watch in watches:
            await watch.read()
        code = await refusal(stub.Watch(HealthCheckRequest()).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(HealthCheckRequest())).status == NOT_SERVING
        for watch in watches:
            watch.cancel()
        async with asyncio.timeout(10):
            while served._watches:
                await asyncio.sleep(0.01)
        assert (await stub.Watch(HealthCheckRequest()).read()).status == NOT_SERVING

    serve(action)


def test_all_are_answered_unread_while_others_send_slowly() -> None:
    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        async def never() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        slow = channel.stream_unary(CHECK)(never())
        await slow.wait_for_connection()
        async with asyncio.timeout(10):
            while not served._arriving.locked():
                await asyncio.sleep(0.01)
        # Neither waits for the place: an unknown service is answered as the server itself is.
        unknown = HealthCheckRequest(service="x")
        watches = [channel.stream_stream(WATCH)(never()) for _ in range(10)]
        for watch in watches:
            assert HealthCheckResponse.FromString(await watch.read()).status == NOT_SERVING
        assert (await HealthStub(channel).Check(unknown)).status == NOT_SERVING
        assert (await HealthStub(channel).Watch(unknown).read()).status == NOT_SERVING
        assert served._arriving.locked()
        for call in (slow, *watches):
            call.cancel()

    serve(action)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (bytes(1025), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\x0a\x09", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_no_request_is_the_callers_fault(raw: bytes, code: grpc.StatusCode) -> None:
    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        assert await refusal(channel.unary_unary(CHECK)(raw)) is code

    serve(action)


def test_a_request_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ARRIVAL_SECONDS", 0.05)

    async def action(served: Health, channel: grpc.aio.Channel) -> None:
        async def never() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        code = await refusal(channel.stream_unary(CHECK)(never()))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED

    serve(action)
