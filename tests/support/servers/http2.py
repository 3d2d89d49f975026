"""HTTP/2 by hand: calls that no gRPC library would make, such as messages of which half is sent."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
MAX_FRAME_BYTES = 16_384
HEADER_BYTES = 9
PING_BYTES = 8
TIMEOUT_S = 5.0


def message(payload: bytes, *, declared: int | None = None, compressed: bool = False) -> bytes:
    """Returns a gRPC message; `declared` is the length that its prefix states instead of the
    payload's own."""
    size = len(payload) if declared is None else declared
    return struct.pack(">BI", compressed, size) + payload


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:]
    return head + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Encodes a header for HPACK: neither indexed nor compressed."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(size: int) -> bytes:
    """Encodes the length of a text, of which HPACK has seven bits in the first byte."""
    if size < 127:
        return bytes([size])
    encoded, rest = bytearray(b"\x7f"), size - 127
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*encoded, rest])


def headers_of(path: str, headers: Mapping[str, str]) -> bytes:
    """Returns the header block of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
        **headers,
    }
    return b"".join(_literal(name, value) for name, value in fields.items())


class Connection:
    """A connection with any number of streams, of each of which the server may send `window` bytes,
    64 KiB if None; from the address `source`, if one is given. `ended` has the streams that the
    server has ended, and 0 once it ends the connection. Raises OSError if the server lets it wait
    for longer than `connect_s`."""

    def __init__(
        self,
        address: str,
        window: int | None = None,
        source: str = "",
        connect_s: float = TIMEOUT_S,
    ) -> None:
        host, _, port = address.rpartition(":")
        own_address = (source, 0) if source else None
        self._socket = socket.create_connection((host, int(port)), connect_s, own_address)
        self._socket.settimeout(TIMEOUT_S)
        self._received = b""
        self._initial_window = 65_535
        self._window = 65_535
        self._windows: dict[int, int] = {}
        self.ended: set[int] = set()
        own = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self._send(PREFACE + _frame(SETTINGS, 0, 0, own))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    @property
    def is_open(self) -> bool:
        return 0 not in self.ended

    def call(self, path: str, **headers: str) -> int:
        """Begins a call; returns its stream."""
        stream = 2 * len(self._windows) + 1
        self._windows[stream] = self._initial_window
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._send(_frame(HEADERS, END_HEADERS, stream, headers_of(path, named)))
        return stream

    def storm(self, num_calls: int, path: str) -> None:
        """Begins so many calls and resets each at once, without a look at what the server says."""
        block = headers_of(path, {})
        cancel = struct.pack(">I", CANCEL)
        sent = bytearray()
        for _ in range(num_calls):
            stream = 2 * len(self._windows) + 1
            self._windows[stream] = self._initial_window
            sent += _frame(HEADERS, END_HEADERS, stream, block)
            sent += _frame(RST_STREAM, 0, stream, cancel)
        self._send(bytes(sent))

    def ping(self, count: int = 1) -> int:
        """Sends so many pings, and returns how many the server takes before it stops to read."""
        frame = _frame(PING, 0, 0, bytes(PING_BYTES))
        view = memoryview(frame * count)
        sent = 0
        while sent < len(view) and select.select([], [self._socket], [], 1.0)[1]:
            try:
                sent += self._socket.send(view[sent : sent + MAX_FRAME_BYTES])
            except OSError:
                self.ended.add(0)
                break
        return sent // len(frame)

    def send(self, stream: int, data: bytes, *, end: bool = False, wait_s: float = 0.5) -> int:
        """Sends data as far as the server's windows let it, and returns the bytes sent: once all
        are, the stream has ended, or the server has taken nothing for `wait_s`."""
        view, sent, last_s = memoryview(data), 0, time.monotonic()
        while sent < len(view) and self.is_open and stream not in self.ended:
            self.receive()
            size = min(len(view) - sent, MAX_FRAME_BYTES, self._window, self._windows[stream])
            if size > 0:
                flags = END_STREAM if end and sent + size == len(view) else 0
                self._send(_frame(DATA, flags, stream, bytes(view[sent : sent + size])))
                self._window -= size
                self._windows[stream] -= size
                sent, last_s = sent + size, time.monotonic()
            elif time.monotonic() - last_s > wait_s:
                break
            else:
                self.receive(0.02)
        return sent

    def receive(self, wait_s: float = 0.0) -> None:
        """Handles what has arrived, or arrives first within `wait_s`."""
        while self.is_open and select.select([self._socket], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.ended.add(0)
            self._received += data
            while len(self._received) >= HEADER_BYTES:
                size = int.from_bytes(self._received[:3], "big")
                if len(self._received) < HEADER_BYTES + size:
                    break
                kind, flags, stream = struct.unpack(">BBI", self._received[3:HEADER_BYTES])
                payload = self._received[HEADER_BYTES : HEADER_BYTES + size]
                self._received = self._received[HEADER_BYTES + size :]
                self._handle(kind, flags, stream, payload)

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == INITIAL_WINDOW_SIZE:
                    for each in self._windows:
                        self._windows[each] += value - self._initial_window
                    self._initial_window = value
            self._send(_frame(SETTINGS, ACK, 0))
        elif kind == WINDOW_UPDATE:
            (increment,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += increment
            elif stream in self._windows:
                self._windows[stream] += increment
        elif kind == PING and not flags & ACK:
            self._send(_frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)
        elif kind == GOAWAY:
            self.ended.add(0)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.ended.add(0)
