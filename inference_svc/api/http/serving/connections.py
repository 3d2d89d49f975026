"""Limits of connections: callers have shares of them; connections that send no request, or do not
read, are closed."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference_svc.api.http.serving.http1 import StrictServer
from servicekit.errors import ShareExceeded
from servicekit.pace import MinimumRate, Pace
from servicekit.shares import Reservation, Shares

HEADER_SECONDS = 20.0
"""Time for a request's header: from the connection, or from the first byte of a further request."""
HANDSHAKE_SECONDS, TLS_CLOSE_SECONDS = 10.0, 10.0
"""Time for a TLS handshake; and at the end for unsent bytes, and the client's notice."""
WRITE_SECONDS, MIN_WRITE_BYTES_PER_S = 30.0, 16 << 10
"""How long a client may read none of the bytes buffered for it; and as long it may be behind this
rate, of which a response of 20 MB takes twenty minutes."""
CLOSE_SECONDS = 1.0
"""Time for the last bytes on a connection whose keep-alive has timed out."""
MAX_CONNECTIONS = 4096
"""Each costs some 10 KB here, and the kernel's buffers. Requests that run or wait are far fewer."""
STRANGERS = 0.25
"""The part of the connections that is left to those without an authenticated request."""
MAX_STRANGER_BYTES = 20 << 20
"""Held of all requests whose callers are not known yet, and of their TLS."""
TLS_BYTES, TLS_READ_BYTES = 70 << 10, 16 << 10
"""The memory of TLS for a connection, as measured during a handshake (afterwards it is 44 KiB); and
of a record, which is read at once."""
UNREAD_BYTES, READ_BYTES = 8 << 10, 256 << 10
"""Read from a socket at once: while thousands may send at the same moment; and of a body that is
wanted, whose memory is reserved."""
MAX_UNSENT_BYTES = 64 << 10
"""Of a response, before the next part waits for its client."""
MAX_LINGERING, PEER_SHARE = 128, 0.5
"""How many refused clients may send on for a moment, known ones and others; and a peer's share of
them."""
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
    """The connections of one server, which are of three kinds. Strangers have sent nothing, or a
    request whose caller is not known. Busy ones have an authenticated request, each held against
    its caller's share of three quarters of all. Idle ones have had one.

    When all are taken, one is closed for a new one: while strangers have more than their quarter,
    the one of the peer with most strangers that has waited longest, else, of the account with the
    most idle ones, the longest idle. So probes and callers get in, however many connections others
    hold.
    """

    def __init__(self, max_connections: int, share: float = 1.0) -> None:
        self.max_connections = max_connections
        self._kept_for_strangers = max(1, int(max_connections * STRANGERS))
        self.busy = Shares("connections", max(1, max_connections - self._kept_for_strangers), share)
        self._lingering = [Shares("lingering", MAX_LINGERING, PEER_SHARE) for _ in range(2)]
        self._open: set[Connection] = set()
        self._strangers: dict[str, dict[Connection, None]] = {}
        self.num_strangers = 0
        self.stranger_bytes = 0
        self._peer_bytes: Counter[str] = Counter()
        self._idle: dict[str, dict[Connection, None]] = {}

    @property
    def all_open(self) -> frozenset[Connection]:
        """The open connections, of strangers and of known callers."""
        return frozenset(self._open)

    def open(self, connection: Connection) -> bool:
        """Returns whether there is a place for a new connection; another may be closed for it."""
        if len(self._open) >= self.max_connections and not self._make_place():
            return False
        self._open.add(connection)
        self.set_stranger(connection)
        return True

    def close(self, connection: Connection) -> None:
        """Idempotent."""
        self._open.discard(connection)
        self._leave(connection)

    def close_all(self) -> None:
        for each in list(self._open):
            self._abort(each)

    def set_stranger(self, connection: Connection) -> None:
        """Has it wait from now on, holding nothing but the memory of TLS."""
        if connection not in self._open:
            return
        self._leave(connection)
        self._strangers.setdefault(connection.peer, {})[connection] = None
        self.num_strangers += 1
        self.hold(connection, 0)

    def set_busy(self, connection: Connection, account: str) -> Reservation:
        """Raises ShareExceeded, which leaves it as it was."""
        place = self.busy.reserve(account)
        self._leave(connection)
        return place

    def set_idle(self, connection: Connection, account: str) -> None:
        if connection in self._open:
            self._leave(connection)
            connection.account = account
            self._idle.setdefault(account, {})[connection] = None

    def begin_request(self, connection: Connection) -> None:
        """Has an idle one be a stranger until the caller of its next request is known."""
        if connection in self._idle.get(connection.account, {}):
            self.set_stranger(connection)

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """Notes how much a stranger holds beside its TLS. If all hold too much, closes connections
        of the peer that holds most, the largest first."""
        if connection not in self._strangers.get(connection.peer, {}):
            return
        num_bytes += connection.tls_bytes
        self._count(connection, num_bytes)
        while self.stranger_bytes > MAX_STRANGER_BYTES:
            peer = max(self._peer_bytes, key=self._peer_bytes.__getitem__)
            self._abort(max(self._strangers[peer], key=lambda each: each.stranger_bytes))

    def linger(self, connection: Connection, is_known: bool) -> Reservation | None:
        """Returns a place for discarding the bytes that a refused client still sends; None if its
        peer, or all that are known or unknown like it, have too many."""
        try:
            return self._lingering[is_known].reserve(connection.peer)
        except ShareExceeded:
            return None

    def _count(self, connection: Connection, num_bytes: int) -> None:
        self._peer_bytes[connection.peer] += num_bytes - connection.stranger_bytes
        self.stranger_bytes += num_bytes - connection.stranger_bytes
        connection.stranger_bytes = num_bytes

    def _leave(self, connection: Connection) -> None:
        """Takes it from the strangers, or the idle ones."""
        if _remove(self._strangers, connection.peer, connection):
            self.num_strangers -= 1
            self._count(connection, 0)
            if connection.peer not in self._strangers:
                del self._peer_bytes[connection.peer]
        _remove(self._idle, connection.account, connection)

    def _make_place(self) -> bool:
        groups = self._idle
        if not groups or self.num_strangers > self._kept_for_strangers:
            groups = self._strangers
        most = max(groups.values(), key=len, default={})
        longest = next(iter(most), None)
        if longest is not None:
            self._abort(longest)
        return longest is not None

    def _abort(self, connection: Connection) -> None:
        self.close(connection)
        connection.abort()


def _remove(groups: dict[str, dict[Connection, None]], name: str, connection: Connection) -> bool:
    """Returns whether it was there."""
    group = groups.get(name, {})
    if connection not in group:
        return False
    del group[connection]
    if not group:
        del groups[name]
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
        self.conn = StrictServer(self.config.h11_max_incomplete_event_size or UNREAD_BYTES)
        self.app_state = {"connection": self}
        self.peer = self.account = ""
        self.stranger_bytes = self.tls_bytes = 0
        self._limit = limit
        self._socket: asyncio.BaseTransport | None = None
        self._place: Reservation | None = None
        self._head_bytes = 0
        self._header_timer = Timer()
        self._write_timer = Timer()
        self._reader = _new_reader()
        self._unsent_bytes, self._paused_s = 0, 0.0
        self.reads_body = False

    def open(self, accepted: asyncio.BaseTransport, tls_bytes: int = 0) -> bool:
        """Takes a place for an accepted socket, of which TLS holds so much before it is a
        connection here. Returns False if there is none."""
        self._socket, self.tls_bytes = accepted, tls_bytes
        self.peer = peer_of(accepted.get_extra_info("peername"))
        return self._limit.open(self)

    def close(self) -> None:
        """Gives its places back. Idempotent."""
        self._limit.close(self)
        if self._place is not None:
            self._place.release()
            self._place = None
        self._header_timer.cancel()
        self._write_timer.cancel()
        self.app_state = {}  # frees cycles through it at once

    def abort(self) -> None:
        """Closes it at once, with bytes unsent, also while TLS shakes hands."""
        if self._socket is not None:
            self._socket.abort()  # type: ignore[attr-defined]

    def admit(self, account: str) -> None:
        """Counts it against the account's share until its response is complete. Raises
        ShareExceeded, which leaves it as it was."""
        if self._place is None and not self.transport.is_closing():
            self._place = self._limit.set_busy(self, account)

    def linger(self, is_known: bool) -> Reservation | None:
        """See `ConnectionLimit.linger`."""
        return self._limit.linger(self, is_known)

    @contextmanager
    def reading_body(self) -> Iterator[None]:
        """Lets the body come in large parts, whose memory is the request's. Before and after, not
        much more than one read's bytes lies here unread."""
        self.reads_body = True
        self._read_at_once(READ_BYTES)
        try:
            yield
        finally:
            self.reads_body = False
            self._read_at_once(UNREAD_BYTES)

    def _read_at_once(self, num_bytes: int) -> None:
        # asyncio's transport of plain sockets has this; see TlsProtocol for the other.
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = num_bytes

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Reading.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.conn)
        if self._socket is None and not self.open(transport):
            transport.write(_FULL)
            transport.close()
            return
        transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        if self.tls_bytes:
            transport.set_read_buffer_limits(UNREAD_BYTES)  # type: ignore[attr-defined]
        self._read_at_once(UNREAD_BYTES)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        had_request = self._has_request
        if not had_request:
            self._limit.begin_request(self)
        super().data_received(data)
        if self._has_request:
            self._header_timer.cancel()
            if not had_request:
                self._head_bytes = sum(len(name) + len(value) for name, value in self.headers)
            if len(self.cycle.body) >= UNREAD_BYTES and not self.reads_body:
                self.flow.pause_reading()
        elif not self.transport.is_closing():
            self._await_header()
        if self._place is None:
            self._limit.hold(self, self._held_bytes())

    def _held_bytes(self) -> int:
        body = len(self.cycle.body) if self._has_request else 0
        return len(self.conn.trailing_data[0]) + self._head_bytes + body

    def _await_header(self) -> None:
        """Starts the timer when the header is first missing."""
        self._header_timer.start(HEADER_SECONDS, self.abort)

    def on_response_complete(self) -> None:
        """Lets go of the request, and gives the connection's place back unless much of the response
        is unsent; the next request takes a place again, though it may have come already."""
        self._reader = _new_reader()
        self._head_bytes = 0
        self.scope = self.headers = None  # type: ignore[assignment]
        self.cycle.scope = {}  # type: ignore[typeddict-item]
        self.cycle.body = bytearray()
        if self._place is None:
            self._limit.set_stranger(self)
        elif not self.flow.write_paused:
            self._give_place_back()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self.transport.close()  # else the rest of a body that nobody reads would be read here
        super().on_response_complete()
        if not (self._has_request or self.transport.is_closing()):
            self.flow.resume_reading()

    def _give_place_back(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.release()
            if not self.transport.is_closing():
                self._limit.set_idle(self, place.account)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_SECONDS, self.abort)

    # Writing.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._paused_s = time.monotonic()
        self._write_timer.start(self._reader.remaining_s, self.abort)

    def resume_writing(self) -> None:
        self._write_timer.cancel()
        self._reader.waited(time.monotonic() - self._paused_s)
        if not self.transport.is_closing():
            num_sent = self._unsent_bytes - self.transport.get_write_buffer_size()
            self._reader.received(num_sent)
        super().resume_writing()
        if not self._has_request:
            self._give_place_back()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]


class TlsProtocol(SSLProtocol):
    """TLS of a connection, which takes its place when its socket is accepted: a handshake takes
    tens of kilobytes, and may never end."""

    max_size = TLS_READ_BYTES

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,  # type: ignore[arg-type]
            ssl_shutdown_timeout=TLS_CLOSE_SECONDS,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connection.open(transport, TLS_BYTES):
            super().connection_made(transport)
        else:
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connection.close()  # which hears nothing of it before the handshake has ended


class _Flow(FlowControl):
    """Reads no further requests than a few kilobytes while one is answered."""

    def __init__(self, transport: asyncio.Transport, http: h11.Connection) -> None:
        super().__init__(transport)
        self._http = http

    def resume_reading(self) -> None:
        is_body_over = self._http.their_state is h11.DONE
        if not (is_body_over and len(self._http.trailing_data[0]) >= UNREAD_BYTES):
            super().resume_reading()


def _new_reader() -> MinimumRate:
    """Returns how long a client may take to read a response."""
    return MinimumRate(Pace(MIN_WRITE_BYTES_PER_S, WRITE_SECONDS))


def peer_of(client: Sequence[Any] | None) -> str:
    """Returns who connects: an address, of IPv6 its network of 64 bits, which has one owner."""
    host = client[0].partition("%")[0] if client else ""
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host
