"""TLS handshakes are bounded like connections: in number, in bytes and in time."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from inference_svc.api.http.serving import connections
from tests.support.access.certificates import Authority
from tests.support.inference.connections import CHAT, HEALTH, connected, request_of
from tests.support.inference.front import Front
from tests.support.wait import until_async


@pytest.fixture
def tls(tmp_path: Path) -> tuple[dict[str, Path], ssl.SSLContext]:
    """The server's settings, and a client's context."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("service")
    context = ssl.create_default_context(cafile=authority.path)
    return {"tls_cert_file": cert, "tls_key_file": key}, context


async def exchange(front: Front, context: ssl.SSLContext, data: bytes) -> bytes:
    """Returns the response, of a connection of its own."""
    host, port = front.running.server.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        return head + await reader.readexactly(length)
    finally:
        writer.close()


def test_handshake_that_never_ends(serve_http, tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    settings, _ = tls

    async def body(front: Front) -> None:
        async with connected(front) as silent, connected(front) as half:
            await half.send(b"\x16\x03\x01\x02\x00\x01")
            assert await silent.ends()
            assert await half.ends()
        await until_async(lambda: not front.connections.all_open)
        assert front.connections.stranger_bytes == 0

    serve_http(body, **settings)


def test_handshakes_take_places_and_make_place(
    serve_http, tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    settings, context = tls

    async def body(front: Front) -> None:
        async with AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(front)) for _ in range(4)]
            await until_async(lambda: len(front.connections.all_open) == 4)
            assert front.connections.stranger_bytes == 4 * connections.TLS_BYTES
            assert b" 200 " in await exchange(front, context, HEALTH)
            assert await silent[0].ends()

    serve_http(body, **settings)


def test_large_bodies_arrive(serve_http, tls) -> None:
    """In records, whatever is read at once."""
    settings, context = tls
    fields = {"model": "base", "messages": [{"role": "user", "content": "x" * (3 << 20)}]}

    async def body(front: Front) -> None:
        answer = await exchange(front, context, request_of(json.dumps(fields).encode(), CHAT))
        assert b"characters" in answer, "it is parsed, and too long"
        assert answer.startswith(b"HTTP/1.1 400 ")

    serve_http(body, **settings)


def test_close_ends_handshakes(serve_http, tls) -> None:
    settings, _ = tls

    async def body(front: Front) -> None:
        async with connected(front) as silent:
            await until_async(lambda: len(front.connections.all_open) == 1)
            await front.running.server.close()
            assert await silent.ends()

    serve_http(body, **settings)
