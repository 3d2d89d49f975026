"""A host of images: a real server over TLS or plain, whose answers tests write byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Self

from tests.support.access.certificates import Authority

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """Returns a whole answer; `length` is the announced one, if it is not the body's."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def chunked(*chunks: bytes) -> bytes:
    """Returns a whole answer that does not announce its length."""
    parts = [f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in (*chunks, b"")]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(parts)


class ImageHost:
    """Runs in a thread on a free port of 127.0.0.1, with a certificate of `authority`, also for
    `names`; without an authority it speaks plain HTTP. `files` are answers by path, bytes or what
    writes them. `requests` are the heads of requests, `server_names` the names that clients asked
    for in TLS."""

    def __init__(self, authority: Authority | None = None, *names: str) -> None:
        self.files: dict[str, bytes | Handler] = {}
        self.requests: list[str] = []
        self.ca_file = None if authority is None else authority.path
        self.server_names: list[str | None] = []
        self._context = None if authority is None else self._make_context(authority, names)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="image-host")
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_context(self, authority: Authority, names: tuple[str, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        chain, key = authority.issue("images", *names)
        context.load_cert_chain(chain, key)
        context.sni_callback = lambda connection, name, used: self.server_names.append(name)
        return context

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, target: str) -> str:
        return f"{'http' if self._context is None else 'https'}://{self.address}{target}"

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                target = head.split(" ")[1].partition("?")[0]
                found = self.files.get(target, answer(b"", status="404 Not Found"))
                if isinstance(found, bytes):
                    writer.write(found)
                    await writer.drain()
                else:
                    await found(writer)
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()
            self._tasks.discard(task)
