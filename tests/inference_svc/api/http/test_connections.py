"""Connections that send no request, or do not read, are closed, and no others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


def test_idle_connections_are_closed_for_new_ones(
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
        front.engine.hold.set()
        running = [asyncio.create_task(front.complete()) for _ in range(3)]
        await until_async(lambda: front.engine.num_running == 3)
        async with connected(front) as late:
            assert (await late.read()).startswith(b"HTTP/1.1 503 ")
            assert await late.ends()
        front.engine.hold.clear()
        assert [(await each).choices[0].text for each in running] == ["abc"] * 3

    serve_http(body)


def test_half_of_the_files_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((1024, 512), (1, 1), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        assert connections.max_connections() == expected
