"""Proves on both sides of a connection that the other knows the nodes' secret.

Messages between ranks are pickles, which run code: no byte is unpickled before this. The listener
sends a nonce; the caller answers with its own, the connection's purpose, and an HMAC-SHA256 of all;
the listener answers with one of its own. Everything has a fixed size, and one time limit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

HANDSHAKE_S = 5.0
"""How long a caller, or the listener, may take."""
_MAGIC = b"loadout ranks 1\n"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_CALL = struct.Struct("!H?16s")
_REFUSED = "it closed the connection: is its LOADOUT_INFERENCE_RENDEZVOUS_TOKEN another?"


class HandshakeFailed(Exception):
    """The other side does not know the secret, or is no rank."""


class Call(NamedTuple):
    """The purpose of a connection. `is_control`: for messages; otherwise for steps. The two of a
    rank have the same random `session`, 16 bytes."""

    rank: int
    is_control: bool
    session: bytes


def answer(
    connection: socket.socket, token: str, timeout_s: float = HANDSHAKE_S
) -> tuple[Call, Callable[[], None]]:
    """Takes a caller's part; returns its call, and the function that accepts it. Raises
    HandshakeFailed and OSError."""
    deadline_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + nonce, deadline_s)
    if _receive(connection, len(_MAGIC), deadline_s) != _MAGIC:
        raise HandshakeFailed("it does not speak as a rank")
    found = _receive(connection, _NONCE_BYTES + _CALL.size, deadline_s)
    mac = _receive(connection, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(mac, _mac(token, b"caller", nonce, found)):
        raise HandshakeFailed("its LOADOUT_INFERENCE_RENDEZVOUS_TOKEN is another")

    def accept() -> None:
        _send(connection, _mac(token, b"listener", nonce, found), deadline_s)

    return Call._make(_CALL.unpack(found[_NONCE_BYTES:])), accept


def call(
    connection: socket.socket, token: str, purpose: Call, timeout_s: float = HANDSHAKE_S
) -> None:
    """Takes the caller's part. Raises HandshakeFailed and OSError."""
    deadline_s = time.monotonic() + timeout_s
    if _receive(connection, len(_MAGIC), deadline_s) != _MAGIC:
        raise HandshakeFailed("it is no rank, or of another version")
    nonce = _receive(connection, _NONCE_BYTES, deadline_s)
    said = secrets.token_bytes(_NONCE_BYTES) + _CALL.pack(*purpose)
    _send(connection, _MAGIC + said + _mac(token, b"caller", nonce, said), deadline_s)
    try:
        mac = _receive(connection, _MAC_BYTES, deadline_s)
    except (HandshakeFailed, ConnectionError) as error:
        raise HandshakeFailed(_REFUSED) from error
    if not hmac.compare_digest(mac, _mac(token, b"listener", nonce, said)):
        raise HandshakeFailed("it does not know the secret")


def _mac(token: str, side: bytes, nonce: bytes, said: bytes) -> bytes:
    # The sides differ, so that nobody can send a proof back to who gave it.
    return hmac.digest(token.encode(), side + nonce + said, "sha256")


def _send(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    connection.settimeout(max(0.001, deadline_s - time.monotonic()))
    connection.sendall(data)


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """Returns so many bytes; raises HandshakeFailed if they do not come."""
    found = b""
    while len(found) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            part = connection.recv(size - len(found))
        except TimeoutError:
            raise HandshakeFailed("it says nothing") from None
        if not part:
            raise HandshakeFailed("it closed the connection")
        found += part
    return found
