"""What a server takes of connections that make no call: few, and for a short time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from adapter_store.config import StoreSettings
from servicekit.rpc import server
from servicekit.rpc.server import RpcServer
from servicekit.rpc.tls import CertificateFiles
from tests.servicekit.rpc.served import REQUESTS
from tests.support.access.certificates import Authority
from tests.support.servers.http2 import Connection


def use_option(monkeypatch: pytest.MonkeyPatch, name: str, usual: int, value: int) -> None:
    """Makes servers have another value of an option that is `usual`."""
    options = dict(server.OPTIONS)
    assert options[name] == usual
    monkeypatch.setattr(server, "OPTIONS", tuple((options | {name: value}).items()))


@asynccontextmanager
async def serving(settings: StoreSettings) -> AsyncIterator[str]:
    served = RpcServer("our.Service", "127.0.0.1:0", CertificateFiles(settings), (), REQUESTS)
    await served.start(lambda server: None)
    served.set_serving(True)
    try:
        yield served.address
    finally:
        await served.close()


async def check(channel: grpc.aio.Channel) -> None:
    answer = await HealthStub(channel).Check(HealthCheckRequest(), wait_for_ready=True, timeout=30)
    assert answer.status == HealthCheckResponse.SERVING


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_never_ends_is_ended(
    sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS that says nothing, or the beginning of a hello."""
    use_option(monkeypatch, "grpc.server_handshake_timeout_ms", 10_000, 300)
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")

    def hold(address: str) -> list[bytes]:
        host, _, port = address.rpartition(":")
        held = [socket.create_connection((host, int(port)), 30) for _ in range(20)]
        for each in held:
            each.sendall(sent)
        answers = [each.recv(100) for each in held]  # b"": the server has closed it
        for each in held:
            each.close()
        return answers

    async def main() -> list[bytes]:
        async with serving(StoreSettings(tls_cert_file=cert, tls_key_file=key)) as address:
            holding = asyncio.create_task(asyncio.to_thread(hold, address))
            credentials = grpc.ssl_channel_credentials(authority.pem)
            async with grpc.aio.secure_channel(address, credentials) as channel:
                await check(channel)
            return await holding

    assert asyncio.run(main()) == [b""] * 20


def test_connections_are_few_and_their_places_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    use_option(monkeypatch, "grpc.max_allowed_incoming_connections", 2048, 4)

    def fill(address: str) -> list[Connection]:
        held = [Connection(address) for _ in range(4)]
        for each in held:
            each.receive(10)
            assert each.is_open
        with Connection(address) as refused:
            refused.receive(10)
            assert not refused.is_open
        return held

    async def main() -> None:
        async with serving(StoreSettings()) as address:
            held = await asyncio.to_thread(fill, address)
            with held[0]:
                pass
            async with grpc.aio.insecure_channel(address) as channel:
                await check(channel)
            for each in held[1:]:
                with each:
                    pass

    asyncio.run(main())


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_option(monkeypatch, "grpc.max_connection_idle_ms", 600_000, 300)

    def wait_closed(address: str) -> bool:
        with Connection(address) as connection:
            for _ in range(100):
                connection.receive(0.3)
                if not connection.is_open:
                    return True
        return False

    async def main() -> bool:
        async with serving(StoreSettings()) as address:
            return await asyncio.to_thread(wait_closed, address)

    assert asyncio.run(main())


def test_frequent_pings_are_welcome() -> None:
    """vllm#55102, smg#648: a client's keepalive is no reason for GOAWAY, however long a call waits.
    Without data gRPC lets pings come every two hours, and answers a third one too many with
    too_many_pings."""

    def ping(address: str) -> bool:
        with Connection(address) as connection:
            for _ in range(30):
                assert connection.ping() == 1
                connection.receive(0.05)
            return connection.is_open

    async def main() -> bool:
        async with serving(StoreSettings()) as address:
            return await asyncio.to_thread(ping, address)

    assert asyncio.run(main())


def test_a_flood_of_pings_is_not_read_while_its_answers_are_not() -> None:
    num_pings = 4_000_000  # 68 MB

    def flood(address: str) -> int:
        with Connection(address) as connection:
            return connection.ping(num_pings)

    async def main() -> int:
        async with serving(StoreSettings()) as address:
            flooding = asyncio.create_task(asyncio.to_thread(flood, address))
            async with grpc.aio.insecure_channel(address) as channel:
                await check(channel)
            return await flooding

    before = psutil.Process().memory_info().rss
    assert asyncio.run(main()) < num_pings // 2
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_large_metadata_is_refused() -> None:
    """Of 8 KiB, which gRPC parses before anybody is asked who calls; less is fine."""

    async def code_with(channel: grpc.aio.Channel, num_bytes: int) -> str:
        metadata = (("x-large", "x" * num_bytes),)
        try:
            await HealthStub(channel).Check(HealthCheckRequest(), metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def main() -> list[str]:
        async with (
            serving(StoreSettings()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            return [await code_with(channel, size) for size in (7_000, 7_000, 9_000, 9_000)]

    assert asyncio.run(main()) == ["OK", "OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
