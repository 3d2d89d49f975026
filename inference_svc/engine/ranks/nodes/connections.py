"""Connections between machines, whose other end may vanish without a word."""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection

IDLE_S, PROBE_S, NUM_PROBES = 10, 5, 4
"""An idle connection is probed after so long, and this often; then it is closed."""


def prepare(connection: socket.socket, silence_s: float) -> None:
    """Has small messages go at once, and a connection end whose data nobody takes for so long."""
    connection.settimeout(None)
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000)),
    )
    for option in options:
        connection.setsockopt(*option)


def limit_time(connection: socket.socket, option: int, seconds: float) -> None:
    """Has SO_RCVTIMEO or SO_SNDTIMEO end a blocking call after so long, with BlockingIOError."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, limit)


def as_connection(connection: socket.socket) -> Connection:
    """Returns the socket as a connection for messages, which has it from then on."""
    return Connection(connection.detach())
