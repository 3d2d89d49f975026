"""The sockets that gRPC has accepted, found among the files of this process.

gRPC for Python neither lists its connections nor closes one. Their sockets are files of this
process, which the system lists; a socket that is shut down ends its connection as if the peer had.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

from servicekit.rpc import syn_filter

logger = logging.getLogger(__name__)

_FILES = "/proc/self/fd"
_ENTRIES_BYTES = 32 << 10
_ENTRY = struct.Struct("=QqHB")
"""How Linux lists a file of a folder: inode, offset, length of the entry, kind; then its name."""
_INFO_BYTES = 136
_RECEIVED_AT = 128
"""Where Linux's tcp_info has the bytes received, of 64 bits."""
_NOBODY = struct.pack("=H14x", socket.AF_UNSPEC)
"""A socket that is connected to this is disconnected."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection. One connection at a time has it."""

    host: str
    port: int


@lru_cache(maxsize=4096)  # a connection's calls name the same one
def peer_of_call(text: str) -> Peer | None:
    """Returns the peer that gRPC names so, such as ipv4:10.0.0.1:4711; None without an address."""
    kind, _, rest = text.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return None
    host, _, port = unquote(rest).rpartition(":")
    try:
        return _peer((host.strip("[]"), int(port)))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted socket: a number of a file, which may mean another one by now, and the inode that
    tells."""

    file: int
    inode: int
    peer: Peer

    def received_bytes(self) -> int:
        """Returns how much has arrived, read or not; 0 where the system does not say, or for a
        socket that is closed."""
        with suppress(OSError), _borrowed(self.file) as found:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if len(info) >= _INFO_BYTES:
                received: int = struct.unpack_from("Q", info, _RECEIVED_AT)[0]
                return received
        return 0


class AcceptedSockets:
    """The sockets that this process has accepted at a port, and the listening ones, from the first
    `read` to `close`. For one thread.

    It holds two files all the time, so that it works when the process has no others left.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._files: tuple[int, int] | None = None
        """The folder of files, and one to put in the place of another."""
        self._seen: dict[int, tuple[int, Peer | None]] = {}
        self._refused: frozenset[str] = frozenset()
        self._has_filters = True

    def close(self) -> None:
        """Idempotent."""
        for file in self._files or ():
            os.close(file)
        self._files = None

    def read(self) -> list[Accepted] | None:
        """Returns the open sockets; None where the system does not list files, or cannot at the
        moment."""
        seen: dict[int, tuple[int, Peer | None]] = {}
        try:
            if self._files is None:
                self._files = _open_twice(_FILES)
            files = _listed(self._files[0])
        except OSError:
            return None
        for file in files:
            with suppress(OSError):
                found = os.fstat(file)
                if not stat.S_ISSOCK(found.st_mode):
                    continue
                known = self._seen.get(file)
                if known is None or known[0] != found.st_ino:
                    known = found.st_ino, self._accepted_from(file)
                seen[file] = known
        self._seen = seen
        return [
            Accepted(file, inode, peer) for file, (inode, peer) in seen.items() if peer is not None
        ]

    def reset(self, accepted: Accepted) -> None:
        """Resets the connection, if the file is still this socket. Data that has arrived is
        dropped: after a mere shutdown gRPC would read on, thousands of calls."""
        if self._files is None:
            return
        folder, copy = self._files
        with suppress(OSError):
            # The copy stays the same socket, whoever closes the other, and needs no new file.
            os.dup2(accepted.file, copy, inheritable=False)
            try:
                if os.fstat(copy).st_ino == accepted.inode:
                    _LIBC.connect(copy, _NOBODY, len(_NOBODY))
            finally:
                os.dup2(folder, copy, inheritable=False)

    def refuse(self, addresses: Sequence[str]) -> bool:
        """Has new connections of these addresses, and of no others, wait until they are no longer
        refused: of the first of them, if they are too many. Returns whether it could."""
        if self._refused == frozenset(addresses):
            return True
        done = []
        for file in self._seen:
            with suppress(OSError), _borrowed(file) as found:
                if self._listens(found):
                    done.append(syn_filter.refuse(found, addresses))
        is_done = bool(done) and all(done)
        if is_done:
            self._refused = frozenset(addresses)
        elif done and self._has_filters:
            self._has_filters = False
            logger.warning("the system has no filters: addresses that storm are not kept out")
        return is_done

    def _listens(self, found: socket.socket) -> bool:
        if found.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        return is_listening and found.getsockname()[1] == self._port

    def _accepted_from(self, file: int) -> Peer | None:
        """Returns who connected to the port, None for other sockets."""
        try:
            with _borrowed(file) as found:
                if found.family not in {socket.AF_INET, socket.AF_INET6}:
                    return None
                if found.getsockname()[1] != self._port:
                    return None
                return _peer(found.getpeername())
        except OSError:  # it listens, or its peer has gone
            return None


def _open_twice(folder: str) -> tuple[int, int]:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file, os.dup(file)
    except OSError:
        os.close(file)
        raise


def _listed(folder: int) -> list[int]:
    """Returns the numbers that an open folder lists. `os.listdir` would open another file. Raises
    OSError."""
    list_entries = getattr(_LIBC, "getdents64", None)
    if list_entries is None:
        raise OSError("the system does not list files")
    os.lseek(folder, 0, os.SEEK_SET)
    buffer = ctypes.create_string_buffer(_ENTRIES_BYTES)
    found = []
    while (length := list_entries(folder, buffer, _ENTRIES_BYTES)) != 0:
        if length < 0:
            raise OSError(ctypes.get_errno(), "cannot list the files of this process")
        entries, start = buffer.raw[:length], 0
        while start < length:
            entry_bytes = _ENTRY.unpack_from(entries, start)[2]
            name = entries[start + _ENTRY.size : start + entry_bytes].partition(b"\0")[0]
            start += entry_bytes
            if name.isdigit():
                found.append(int(name))
    return found


@contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """Yields the socket of a file that belongs to others, and leaves it open."""
    found = socket.socket(fileno=file)
    try:
        yield found
    finally:
        found.detach()


def _peer(name: tuple[Any, ...]) -> Peer:
    """Raises ValueError if it is not an address."""
    address: IPv4Address | IPv6Address = ip_address(name[0].partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return Peer(str(address), int(name[1]))
