"""Bare connections to a server's HTTP address."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.inference.front import Front

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHAT = "/v1/chat/completions"


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


def request_of(body: bytes, path: str = CHAT, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode() + body
