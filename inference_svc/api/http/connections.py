"""Limits of connections: those that send no request, or do not read, are closed."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""Time for a request's header: from the connection, or from the first byte of a further request."""
WRITE_SECONDS = 30.0
"""Time for a client to read some of what is buffered for it."""
CLOSE_SECONDS = 1.0
"""Time for the last bytes on a connection whose keep-alive has timed out."""
MAX_CONNECTIONS = 4096
"""Each costs some 10 KB here, and the kernel's buffers. Requests that run or wait are far fewer."""
SEND_BUFFER_BYTES = 256 << 10
"""In the kernel, which would otherwise buffer megabytes for a client that does not read: 0.1 s of
20 Mbit/s."""
IDLE_PROBE_SECONDS, PROBE_SECONDS, NUM_PROBES = 60, 15, 4
"""A machine that has vanished is noticed within two minutes."""

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"retry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


def max_connections() -> int:
    """Returns at most half of the files that this process may open; the rest is for gRPC, the store
    and logs."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = soft_limit != resource.RLIM_INFINITY
    return max(1, min(MAX_CONNECTIONS, soft_limit // 2)) if is_bounded else MAX_CONNECTIONS


def set_socket_options(listening: socket.socket) -> None:
    """Sets the options that its connections inherit."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", NUM_PROBES),
        # Also for data left to send on a closed connection.
        ("TCP_USER_TIMEOUT", int(1000 * WRITE_SECONDS)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


class ConnectionLimit:
    """The connections of one server. The longest idle one is closed for a new one: probes and
    callers get in, however many idle connections others hold."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._idle: dict[Connection, None] = {}

    def mark_idle(self, connection: Connection) -> None:
        """Has no effect on a connection that is idle already."""
        self._idle.setdefault(connection)

    def mark_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def evict_idle(self) -> bool:
        """Closes the longest idle connection; returns whether there was one."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self.mark_busy(longest)
        longest.transport.abort()
        return True


class Timer:
    """A timer on the event loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Has no effect while it runs."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, act)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """Adds limits to uvicorn's protocol, which only bounds the time from a response to the first
    byte of the next request."""

    def __init__(self, limit: ConnectionLimit, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limit = limit
        self._header_timer = Timer()
        self._write_timer = Timer()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= self._limit.max_connections
        super().connection_made(transport)
        if is_full and not self._limit.evict_idle():
            transport.write(_FULL)
            transport.close()
            return
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request:
            self._limit.mark_busy(self)
            self._header_timer.cancel()
        elif not self.transport.is_closing():
            self._await_header()

    def on_response_complete(self) -> None:
        """Marks the connection idle, unless the next request has come already."""
        super().on_response_complete()
        if not self._has_request and not self.transport.is_closing():
            self._limit.mark_idle(self)

    def _await_header(self) -> None:
        """Starts the timer when the header is first missing."""
        self._limit.mark_idle(self)
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
        self._limit.mark_busy(self)
        self._header_timer.cancel()
        self._write_timer.cancel()
        super().connection_lost(exc)
