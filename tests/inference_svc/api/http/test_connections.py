"""Connections that send no request, or do not read, are closed, and no others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api.http import connections
from tests.inference_svc.api.http.conftest import Front
from tests.support.wait import until_async

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHAT = "/v1/chat/completions"
LARGE: dict[str, Any] = {
    "model": "base",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "n": 32,
    "max_tokens": 40,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Raw:
    """A client's socket, read only on demand."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._loop = connected, asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def post(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        await self.send(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )

    async def read(self, num_bytes: int = 1 << 16) -> bytes:
        """Returns b"" when the connection has ended."""
        try:
            return await self._loop.sock_recv(self._socket, num_bytes)
        except ConnectionResetError:
            return b""

    async def ends(self, within_s: float = 60.0) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while await self.read():
                    pass
            return True
        except TimeoutError:
            return False


@asynccontextmanager
async def connected(front: Front, receive_bytes: int = 0) -> AsyncIterator[Raw]:
    host, port = front.running.server.http_address.split(":")
    with socket.socket() as made:
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
        yield Raw(made)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits what the kernel buffers for a client that does not read."""
    monkeypatch.setattr(connections, "SEND_BUFFER_BYTES", 4096)


@pytest.mark.usefixtures("short_timeouts")
def test_connection_without_a_request_is_closed(serve_http) -> None:
    async def body(front: Front) -> None:
        async with connected(front) as idle, connected(front) as trickling:
            trickle = asyncio.create_task(_trickle(trickling))
            assert await idle.ends()
            with pytest.raises(ConnectionError):
                await trickle

    serve_http(body)


async def _trickle(client: Raw) -> None:
    """Sends a header without an end, until the connection has one."""
    await client.send(b"GET /health HTTP/1.1\r\nx: ")
    while True:
        await client.send(b"x")
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("short_timeouts")
def test_keep_alive_bounds_the_next_header(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(front: Front) -> None:
        monkeypatch.setattr(connections, "HEADER_SECONDS", 60.0)  # a busy machine sends it late
        async with connected(front) as client:
            await client.send(HEALTH)
            assert b" 200 " in await client.read()
            monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
            assert not await client.ends(within_s=0.4), "it may send another request"
            await client.send(HEALTH)
            assert b" 200 " in await client.read()
            with pytest.raises(ConnectionError):
                await _trickle(client)
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
        front.engine.hold.set()
        waiting = asyncio.create_task(front.complete())
        await asyncio.sleep(2 * connections.HEADER_SECONDS)
        front.engine.hold.clear()
        assert (await waiting).choices[0].text == "abc", "a request may take longer than its header"

    serve_http(body)


@pytest.mark.usefixtures("short_timeouts", "small_buffers")
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_stops_reading_loses_its_requests(serve_http, stream: bool) -> None:
    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=4096) as client:
            front.engine.step_s = 0.05 if stream else 0.0
            await client.post(CHAT, LARGE | {"stream": stream})
            await until_async(lambda: len(front.engine.submitted) == LARGE["n"])
            if stream:
                counts = front.engine._running
                await until_async(lambda: min(count for _, count in counts.values()) >= 5)
                front.engine.hold.set()  # nothing but the write timeout ends it
            await until_async(lambda: front.engine.num_running == 0)
            line = f'http_requests_total{{route="{CHAT}",status="{499 if stream else 200}"}} 1.0'
            await front.until_metric(line)
        assert len(front.engine.cancelled) == (LARGE["n"] if stream else 0)

    serve_http(body)


@pytest.mark.usefixtures("small_buffers")
def test_slow_reader_gets_larger_chunks(serve_http) -> None:
    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=4096) as client:
            await client.post(CHAT, LARGE)
            await until_async(lambda: len(front.engine.submitted) == LARGE["n"])
            await until_async(lambda: front.engine.num_running == 0)
            data = bytearray()
            while part := await client.read():
                data += part
        text = b"".join(line for line in data.split(b"\r\n") if line.startswith(b"data: "))
        events = [event for event in text.decode().split("data: ") if event]
        assert events.pop().strip() == "[DONE]"
        chunks = [json.loads(event)["choices"][0] for event in events]
        num_tokens = LARGE["n"] * LARGE["max_tokens"]
        assert sum(len(each["token_ids"]) for each in chunks) == num_tokens
        assert sum(len(each["logprobs"]["content"]) for each in chunks) == num_tokens
        assert len([each for each in chunks if each["finish_reason"]]) == LARGE["n"]
        # The sockets take little; the rest of each choice arrives in one delta.
        assert len(chunks) < num_tokens / 4

    serve_http(body)


def test_longest_stranger_is_closed_for_a_new_one(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)

    async def body(front: Front) -> None:
        async with connected(front) as first, connected(front) as second, connected(front):
            await first.send(b"GET /hea")
            await front.running.health_of()
            async with connected(front) as newcomer:
                await newcomer.send(HEALTH)
                assert b" 200 " in await newcomer.read()
                assert await first.ends()
                assert not await second.ends(within_s=0.05)

    serve_http(body)


def test_callers_leave_places_for_probes(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)

    async def body(front: Front) -> None:
        front.engine.hold.set()
        running = [asyncio.create_task(front.complete()) for _ in range(6)]
        await until_async(lambda: front.engine.num_running == 6)
        async with connected(front) as half_sent:
            await half_sent.send(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode()
            )
            assert b" 429 " in await half_sent.read()
        async with connected(front) as probe:
            await probe.send(HEALTH)
            assert b" 200 " in await probe.read()
        front.engine.hold.clear()
        assert [(await each).choices[0].text for each in running] == ["abc"] * 6
        assert (await front.complete()).choices[0].text == "abc", "a place is free again"

    serve_http(body)


def test_longest_idle_connection_is_closed_when_all_are_taken(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"

    async def body(front: Front) -> None:
        async with AsyncExitStack() as stack:
            idle = []
            for _ in range(4):
                idle.append(await stack.enter_async_context(connected(front)))
                await idle[-1].send(models)
                assert b" 200 " in await idle[-1].read()
            late = await stack.enter_async_context(connected(front))
            await late.send(HEALTH)
            assert b" 200 " in await late.read()
            assert await idle[0].ends()
            assert not await idle[1].ends(within_s=0.05)

    serve_http(body)


class Peer:
    """A connection as its limit knows it."""

    def __init__(self, peer: str, closed: list[Any]) -> None:
        self.peer, self.stranger_bytes = peer, 0
        self.transport = SimpleNamespace(abort=lambda: closed.append(self))


def test_peer_with_the_most_strangers_makes_place() -> None:
    closed: list[Any] = []
    limit = connections.ConnectionLimit(4)
    many = [Peer("many", closed) for _ in range(3)]
    one = Peer("one", closed)
    for index, each in enumerate((one, *many)):
        assert limit.make_place(index)
        limit.add_stranger(each)
    limit.renew_stranger(many[0])
    assert limit.make_place(4)
    assert closed == [many[1]]


def test_bytes_of_strangers_are_bounded() -> None:
    closed: list[Any] = []
    limit = connections.ConnectionLimit(4)
    first, second, known = (Peer("many", closed) for _ in range(3))
    for each in (first, second, known):
        limit.add_stranger(each)
    limit.remove(known)
    limit.hold(known, 2 * connections.MAX_STRANGER_BYTES)
    limit.hold(first, connections.MAX_STRANGER_BYTES)
    assert closed == []
    limit.hold(second, 1)
    assert closed == [first]
    limit.hold(second, connections.MAX_STRANGER_BYTES - 1)
    assert closed == [first], "what the other held is free again"


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_peers(host: str, peer: str) -> None:
    assert connections.peer_of((host, 1)) == peer


def test_half_of_the_files_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((1024, 512), (1, 1), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        assert connections.max_connections() == expected
