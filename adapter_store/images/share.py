"""Hands the files of complete images to services on the same machine.

`contract.images.sharing` has the protocol. A call that is authorised offers a file; the socket
gives it only to who has the ticket. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from contract.images.sharing import GIVEN, GREETING, REFUSED, SHARE_ID_BYTES, TICKET_BYTES
from servicekit.errors import FailedPrecondition
from servicekit.shared_memory import descriptors_for
from servicekit.shares import Shares

logger = logging.getLogger(__name__)

MAX_OFFERS = 1024
"""Images that are offered, or mapped by receivers, at once, if this process may open enough files:
each takes a connection. One account has its share."""
MAX_STRANGERS = 64
"""Connections that have shown no valid ticket."""
STRANGER_SECONDS = 5.0
"""How long such a connection may last."""
BACKLOG = 64
_CREDENTIALS = struct.Struct("iII")
"""Linux's ucred: process, user and group."""


class Offer:
    """One image, offered to one call. `ended` is set when its receiver has let go of the file."""

    def __init__(self, file: int) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.file = file
        self.taken = asyncio.Event()
        self.ended = asyncio.Event()
        self.connection: asyncio.Task[None] | None = None


class Offers:
    """The offers of this process, by ticket. `share_id` is how receivers know the process again."""

    def __init__(self, share: float = 1.0) -> None:
        self.share_id = secrets.token_bytes(SHARE_ID_BYTES)
        self.places = Shares("shared_images", descriptors_for(MAX_OFFERS), share)
        self._open: dict[bytes, Offer] = {}

    @contextlib.contextmanager
    def offer(self, file: int, account: str) -> Iterator[Offer]:
        """Offers a file as long as the context lasts: who has it by then keeps what it maps.
        Raises ShareExceeded."""
        with self.places.reserve(account):
            offer = Offer(file)
            self._open[offer.ticket] = offer
            try:
                yield offer
            finally:
                self._open.pop(offer.ticket, None)
                if offer.connection is not None:
                    offer.connection.cancel()

    def take(self, ticket: bytes) -> Offer | None:
        """Returns the offer of a ticket, which nobody can take again."""
        offer = self._open.pop(ticket, None)
        if offer is not None:
            offer.taken.set()
        return offer


class ShareSocket:
    """Gives files to who has a ticket, over a unix socket. `users` are the ids of users who may
    connect besides this process's own: with any, all can reach the socket, and the others' are
    refused. Raises FailedPrecondition if it cannot listen."""

    def __init__(self, path: Path, users: frozenset[int], offers: Offers) -> None:
        self._path = path
        self._users = users | {os.geteuid()}
        self._offers = offers
        self._socket = _listen(path, 0o666 if users else 0o600)
        self._inode = os.stat(path).st_ino
        self._connections: set[asyncio.Task[None]] = set()
        self._num_strangers = 0
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Ends all connections, and removes the socket's file unless another store has replaced
        it."""
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                self._path.unlink()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # too many open files: others are waiting for theirs, too
                logger.warning("share socket", extra={"why": str(error)})
                await asyncio.sleep(1.0)
                continue
            if self._num_strangers >= MAX_STRANGERS or user_of(peer) not in self._users:
                peer.close()
                continue
            peer.setblocking(False)
            task = asyncio.create_task(self._serve(peer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, peer: socket.socket) -> None:
        """Serves one connection: of one ticket at most."""
        with peer:
            self._num_strangers += 1
            try:
                offer = await self._greet(peer)
            finally:
                self._num_strangers -= 1
            if offer is None:
                return
            offer.connection = asyncio.current_task()
            try:
                socket.send_fds(peer, [GIVEN], [offer.file])
                await asyncio.get_running_loop().sock_recv(peer, 1)  # until it is closed
            except OSError:
                pass  # so it is
            finally:
                offer.connection = None
                offer.ended.set()

    async def _greet(self, peer: socket.socket) -> Offer | None:
        """Returns the offer of the ticket that the peer shows in time."""
        loop, ticket = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(STRANGER_SECONDS):
                await loop.sock_sendall(peer, GREETING + self._offers.share_id)
                while len(ticket) < TICKET_BYTES:
                    data = await loop.sock_recv(peer, TICKET_BYTES - len(ticket))
                    if not data:
                        return None
                    ticket += data
                offer = self._offers.take(ticket)
                if offer is None:
                    await loop.sock_sendall(peer, REFUSED)
                return offer
        except (OSError, TimeoutError):
            return None


def _listen(path: Path, mode: int) -> socket.socket:
    """Listens at a path. The socket of a process that has ended is replaced."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.setblocking(False)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_socket():
            raise OSError("there is a file that is no socket")
        path.parent.mkdir(parents=True, exist_ok=True)
        made.unlink(missing_ok=True)
        listening.bind(str(made))
        os.chmod(made, mode)
        listening.listen(BACKLOG)
        made.replace(path)  # nobody connects before it has its mode
    except OSError as error:
        listening.close()
        made.unlink(missing_ok=True)
        raise FailedPrecondition(
            f"--share-socket: cannot listen at {path}: {error}", subject="share_socket"
        ) from error
    return listening


def user_of(peer: socket.socket) -> int | None:
    """Returns the user of the process that has connected."""
    try:
        found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    return int(_CREDENTIALS.unpack(found)[1])
