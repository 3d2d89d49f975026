"""Limits of connections: callers have shares of them; those that send no request, or do not read,
are closed."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from servicekit.shares import Reservation, Shares

HEADER_SECONDS = 20.0
"""Time for a request's header: from the connection, or from the first byte of a further request."""
WRITE_SECONDS = 30.0
"""Time for a client to read some of what is buffered for it."""
CLOSE_SECONDS = 1.0
"""Time for the last bytes on a connection whose keep-alive has timed out."""
MAX_CONNECTIONS = 4096
"""Each costs some 10 KB here, and the kernel's buffers. Requests that run or wait are far fewer."""
STRANGERS = 0.25
"""The part of the connections that is left to those without an authenticated request."""
MAX_STRANGER_BYTES = 8 << 20
"""Held of all requests whose callers are not known yet."""
STRANGER_READ_BYTES, READ_BYTES = 8 << 10, 256 << 10
"""Read from a socket at once: before a request's caller is known, when thousands may send at the
same moment, and from then on."""
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
    """The connections of one server, which are of three kinds. Strangers have sent no request of a
    caller that is known. Busy ones have an authenticated request, each held against its caller's
    share of three quarters of all. Idle ones have had one.

    When all are taken, one is closed for a new one: while strangers have more than their quarter,
    of the peer with most of them the one that has waited longest, else the longest idle one. So
    probes and callers get in, however many connections others hold.
    """

    def __init__(self, max_connections: int, share: float = 1.0) -> None:
        self.max_connections = max_connections
        self._kept_for_strangers = max(1, int(max_connections * STRANGERS))
        self.busy = Shares("connections", max(1, max_connections - self._kept_for_strangers), share)
        self._num_strangers = 0
        self._stranger_bytes = 0
        self._strangers: dict[str, dict[Connection, None]] = {}
        self._idle: dict[Connection, None] = {}

    def add_stranger(self, connection: Connection) -> None:
        self._strangers.setdefault(connection.peer, {})[connection] = None
        self._num_strangers += 1

    def renew_stranger(self, connection: Connection) -> None:
        """Has it wait from now on."""
        own = self._strangers.get(connection.peer, {})
        if connection in own:
            self.remove(connection)
            self.add_stranger(connection)

    def add_idle(self, connection: Connection) -> None:
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Has no effect on a connection that is busy, or gone."""
        self._idle.pop(connection, None)
        own = self._strangers.get(connection.peer, {})
        if connection in own:
            del own[connection]
            self._num_strangers -= 1
            self._stranger_bytes -= connection.stranger_bytes
            connection.stranger_bytes = 0
            if not own:
                del self._strangers[connection.peer]

    def make_place(self, num_connections: int) -> bool:
        """Returns whether there is a place for a new connection beside so many."""
        if num_connections < self.max_connections:
            return True
        idle = next(iter(self._idle), None)
        if idle is None or self._num_strangers > self._kept_for_strangers:
            return self._close(self._longest_stranger())
        return self._close(idle)

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """Counts what a stranger has sent; if all have sent too much, closes some."""
        if connection not in self._strangers.get(connection.peer, {}):
            return
        connection.stranger_bytes += num_bytes
        self._stranger_bytes += num_bytes
        while self._stranger_bytes > MAX_STRANGER_BYTES:
            self._close(self._longest_stranger())

    def _longest_stranger(self) -> Connection | None:
        most = max(self._strangers.values(), key=len, default={})
        return next(iter(most), None)

    def _close(self, connection: Connection | None) -> bool:
        if connection is None:
            return False
        self.remove(connection)
        connection.transport.abort()
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
    byte of the next request. Requests find it in their state as `connection`."""

    def __init__(self, limit: ConnectionLimit, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.app_state = {"connection": self}
        self.peer = ""
        self.stranger_bytes = 0
        self._limit = limit
        self._place: Reservation | None = None
        self._header_timer = Timer()
        self._write_timer = Timer()

    def admit(self, account: str) -> None:
        """Counts it against the account's share until its response is complete. Raises
        ShareExceeded, which leaves it as it was."""
        if self._place is None and not self.transport.is_closing():
            self._place = self._limit.busy.reserve(account)
            self._limit.remove(self)
            self._read_at_once(READ_BYTES)

    def _read_at_once(self, num_bytes: int) -> None:
        # asyncio's transport of plain sockets has this, that of TLS has a buffer of its own.
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = num_bytes

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_place = self._limit.make_place(len(self.connections))
        super().connection_made(transport)
        if not has_place:
            transport.write(_FULL)
            transport.close()
            return
        self._read_at_once(STRANGER_READ_BYTES)
        self.peer = peer_of(self.client)
        self._limit.add_stranger(self)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        self._limit.hold(self, len(data))
        super().data_received(data)
        if self._has_request:
            self._header_timer.cancel()
        elif not self.transport.is_closing():
            self._await_header()

    def on_response_complete(self) -> None:
        """Gives the connection's place back; the next request takes one again, though it may have
        come already."""
        if self._place is not None:
            self._place.release()
            self._place = None
            if not self.transport.is_closing():
                self._limit.add_idle(self)
        else:
            self._limit.renew_stranger(self)
        super().on_response_complete()

    def _await_header(self) -> None:
        """Starts the timer when the header is first missing."""
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
        self._limit.remove(self)
        if self._place is not None:
            self._place.release()
            self._place = None
        self._header_timer.cancel()
        self._write_timer.cancel()
        super().connection_lost(exc)
        # Free at once what its state and its last request's refer to in circles.
        self.app_state = {}
        self.cycle = None  # type: ignore[assignment]


def peer_of(client: tuple[str, int] | None) -> str:
    """Returns who connects: an address, of IPv6 its network of 64 bits, which has one owner."""
    host = client[0].partition("%")[0] if client else ""
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host
