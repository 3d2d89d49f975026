"""What a connection may take: who holds one without asking, or without reading, loses it."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""For a request's header: from when one connects, or from the first byte of a further one."""
WRITE_SECONDS = 30.0
"""For a reader to take something of what waits for it."""
CLOSE_SECONDS = 1.0
"""For the last bytes on a connection that was kept for nothing."""
MAX_CONNECTIONS = 4096
"""Each costs some 10 KB here, and what the kernel buffers of it. Requests that run or wait are far
fewer."""
SEND_BUFFER_BYTES = 256 << 10
"""In the kernel, which would else take megabytes for who does not read: 0.1 s of 20 Mbit/s."""
IDLE_PROBE_SECONDS, PROBE_SECONDS, NUM_PROBES = 60, 15, 4
"""A machine that is gone says nothing: within two minutes it is found out."""

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"retry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


def max_connections() -> int:
    """Of the files that this process may open half are left for all else: gRPC, the store, logs."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = soft_limit != resource.RLIM_INFINITY
    return max(1, min(MAX_CONNECTIONS, soft_limit // 2)) if is_bounded else MAX_CONNECTIONS


def prepare(listening: socket.socket) -> None:
    """What its connections are like, as far as the system knows it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", NUM_PROBES),
        # Also of what is left to send on a connection that is closed already.
        ("TCP_USER_TIMEOUT", int(1000 * WRITE_SECONDS)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


class Room:
    """For one server's connections. Who waits longest without having asked for anything goes first:
    probes and callers get in, however many others hold on to what they do not use."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._idle: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> None:
        """It asks for nothing; if that is so already, it is since then."""
        self._idle.setdefault(connection)

    def leave(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def make(self) -> bool:
        """Whether there is room for one more than there may be."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self.leave(longest)
        longest.transport.abort()
        return True


class Timer:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """While it runs nothing happens."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, act)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """uvicorn's, which bounds only how long a connection is kept after an answer, and only if
    nothing comes."""

    def __init__(self, room: Room, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._room = room
        self._header_timer = Timer()
        self._write_timer = Timer()

    @property
    def _is_asking(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= self._room.max_connections
        super().connection_made(transport)
        if is_full and not self._room.make():
            transport.write(_FULL)
            transport.close()
            return
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_asking:
            self._room.leave(self)
            self._header_timer.cancel()
        elif not self.transport.is_closing():
            self._await_header()

    def on_response_complete(self) -> None:
        """Maybe the next request has come already."""
        super().on_response_complete()
        if not self._is_asking and not self.transport.is_closing():
            self._room.enter(self)

    def _await_header(self) -> None:
        """From the first time on that it is not there."""
        self._room.enter(self)
        self._header_timer.start(HEADER_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.start(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._write_timer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self)
        self._header_timer.cancel()
        self._write_timer.cancel()
        super().connection_lost(exc)
