"""Images that a store on the same machine hands over as files, which are mapped and not received.

`contract.images.sharing` has the protocol. A file is mapped only if nobody can change it any more;
its bytes are checked like those of a stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from contract.images.header import ImageChunk, ImageHeader, LayerEnd, PullMessage
from contract.images.sharing import (
    GET_SEALS,
    GIVEN,
    GREETING,
    REFUSALS,
    SEALS,
    SHARE_ID_BYTES,
    TICKET_BYTES,
)
from inference_svc.errors import CorruptImage, StoreUnavailable
from inference_svc.store.convert import to_pull_message

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""How long the socket may take for an answer: the bytes can be streamed at once."""
RETRY_SECONDS = 1.0
"""How long a socket that did not answer is left alone."""
LOG_SECONDS = 600.0
"""How often the log has a line of the same kind."""
_DESCRIPTOR = struct.Struct("i")


class NotShared(Exception):
    """The image cannot be mapped, for a reason that is a value of the metric's label."""


class SharedImage:
    """An image's file, open and mapped as long as anybody holds it: first the stream, until
    `close`. The connection tells the store that it is. See `MappedImage`."""

    def __init__(self, connection: socket.socket, file: int, num_bytes: int) -> None:
        """Takes the connection and the file, whose bytes nobody can change any more. Raises
        NotShared, and has neither then."""
        self._mapping = _map(file, num_bytes)
        self._connection = connection
        self._file = file
        self.data = memoryview(self._mapping)
        self._lock = threading.Lock()
        self._num_holders, self._is_closed = 1, False

    def close(self) -> None:
        """Ends what the stream holds. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.release()

    def copy(self, offset: int, memory: memoryview) -> None:
        while len(memory):
            count = os.preadv(self._file, [memory], offset)
            if not count:
                raise CorruptImage(f"the image's file ends at {offset} of its bytes")
            memory, offset = memory[count:], offset + count

    def hold(self) -> None:
        with self._lock:
            assert self._num_holders, "the image is unmapped"
            self._num_holders += 1

    def release(self) -> None:
        """Ends what one holder holds. The last one unmaps the file, and closes the connection."""
        with self._lock:
            self._num_holders -= 1
            is_last = not self._num_holders
        if is_last:
            with contextlib.suppress(BufferError):  # else it goes with the last who reads it
                self.data.release()
                self._mapping.close()
            os.close(self._file)
            self._connection.close()


class ShareSocket:
    """The socket of a store on this machine. `count` is called with how each pull's bytes go.
    Thread-safe."""

    def __init__(self, path: Path, count: Callable[[str], None]) -> None:
        self._path = path
        self._count = count
        self._lock = threading.Lock()
        self._share_id = b""
        self._failed_s = float("-inf")
        self._logged_s: dict[str, float] = {}

    def share_id(self) -> bytes:
        """Returns the id that the store's process greets with; b"" if it does not answer."""
        with self._lock:
            if not self._share_id and time.monotonic() - self._failed_s >= RETRY_SECONDS:
                try:
                    connection, self._share_id = self._connect()
                    connection.close()
                except OSError:
                    self._failed_s = time.monotonic()
            return self._share_id

    def take(self, header: ImageHeader) -> SharedImage:
        """Returns the image that the header has a ticket for. Raises NotShared."""
        if len(header.share_ticket) != TICKET_BYTES:
            raise NotShared("refused")
        try:
            connection, _ = self._connect(header.share_ticket)
        except OSError:
            self.forget()
            raise NotShared("unreachable") from None
        try:
            file = _receive(connection)
            try:
                return SharedImage(connection, file, header.total_bytes)
            except BaseException:
                os.close(file)
                raise
        except BaseException:
            connection.close()
            raise

    def report(self, how: str) -> None:
        """Counts a pull: "shared", or why its bytes are streamed. Logs each from time to time."""
        if how == "other_store":
            self.forget()
        how = how if how in KNOWN else "other"
        self._count(how)
        now_s = time.monotonic()
        if now_s - self._logged_s.get(how, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_s[how] = now_s
            if how == "shared":
                logger.info("image is mapped from the store's memory")
            else:
                level = logging.WARNING if how in OWN_REASONS else logging.INFO
                facts = {"reason": how, "socket": str(self._path)}
                logger.log(level, "image is streamed", extra=facts)

    def forget(self) -> None:
        """Asks the store's process for its id again before the next pull: it may be another."""
        with self._lock:
            self._share_id = b""

    def _connect(self, ticket: bytes = b"") -> tuple[socket.socket, bytes]:
        """Returns a connection, over which the ticket is sent at once, and the id that it was
        greeted with. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline_s = time.monotonic() + ANSWER_SECONDS
        try:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(self._path))
            connection.sendall(ticket)
            greeting = b""
            while len(greeting) < len(GREETING) + SHARE_ID_BYTES:
                if time.monotonic() >= deadline_s:  # it comes byte by byte
                    raise OSError("the greeting takes too long")
                data = connection.recv(len(GREETING) + SHARE_ID_BYTES - len(greeting))
                if not data:
                    raise OSError("the connection is closed")
                greeting += data
            if not greeting.startswith(GREETING):
                raise OSError("the socket is no store's")
            return connection, greeting[len(GREETING) :]
        except BaseException:
            connection.close()
            raise


OWN_REASONS = ("unreachable", "refused", "unsealed", "wrong_size")
"""Why this service streams: the socket does not answer, or refuses the ticket; its file can still
be changed, or has another size than the image."""
KNOWN = frozenset(("shared", *REFUSALS, *OWN_REASONS))


class PullCall:
    """A call of PullAdapter: `start` makes it, with a share id or b"". If an image cannot be mapped
    after all, another call streams it."""

    def __init__(
        self, start: Callable[[bytes], Any], sharing: ShareSocket | None, *, can_share: bool
    ) -> None:
        self._start = start
        self._sharing = sharing
        self._lock = threading.Lock()
        self._is_cancelled = self._is_whole = False
        self._share_id = b""
        self.mapped: SharedImage | None = None
        """The image, once the header is here, if it is mapped."""
        if sharing is not None:
            self._share_id = sharing.share_id() if can_share else b""
            if not self._share_id:
                sharing.report("unreachable" if can_share else "resumed")
        self._call = start(self._share_id)

    def cancel(self) -> None:
        """Ends the call, from any thread, unless all of it has come. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            if not self._is_whole:
                self._call.cancel()

    def messages(self) -> Iterator[PullMessage]:
        """Yields the messages. Of a mapped image they have no chunks; what its header may have of
        them follows it. Raises CorruptImage, and as the call."""
        messages: Iterator[PullMessage] = map(to_pull_message, self._call)
        for message in messages:
            if isinstance(message, ImageHeader) and self._sharing is not None and self._share_id:
                if not message.share_ticket:
                    self._sharing.report(message.not_shared or "other_store")
                    yield message
                    continue
                try:
                    image = self._sharing.take(message)
                except NotShared as error:
                    self._sharing.report(str(error))
                    yield from self._streamed()
                    return
                self._sharing.report("shared")
                self.mapped = image
                with contextlib.closing(image):
                    yield replace(message, ends=(), trailer=None)
                    if message.trailer is not None:
                        messages = chain(message.ends, (message.trailer,))
                    yield from self._mapped(image, messages)
                return
            yield message

    def _streamed(self) -> Iterator[PullMessage]:
        """Yields the messages of another call, which streams the image."""
        with self._lock:
            self._call.cancel()
            self._call = self._start(b"")
            if self._is_cancelled:
                self._call.cancel()
        yield from map(to_pull_message, self._call)

    def _mapped(self, image: SharedImage, messages: Iterator[PullMessage]) -> Iterator[PullMessage]:
        """Yields the messages after a header with a ticket. Raises StoreUnavailable if the call is
        cancelled, whether they come from the store or have come with the header."""
        for message in messages:
            if self._is_cancelled:
                raise StoreUnavailable("the pull is cancelled")
            if isinstance(message, ImageChunk | ImageHeader):
                raise CorruptImage("the store sent bytes of an image that it hands over as a file")
            if isinstance(message, LayerEnd):
                end, size = message.end_offset, len(image.data)
                if end > size:
                    raise CorruptImage(f"a part of the image ends at {end} of its {size} bytes")
            else:
                self._is_whole = True  # the store ends the call as soon as the file is let go of
                image.close()
            yield message


def _receive(connection: socket.socket) -> int:
    """Returns the descriptor for the ticket that was sent, which the caller closes. Raises
    NotShared."""
    try:
        # Not for programs that another thread starts meanwhile: recv_fds ignores its flags.
        answer, given, _, _ = connection.recvmsg(
            1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        raise NotShared("unreachable") from None
    files = [
        file
        for level, kind, data in given
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (file,) in _DESCRIPTOR.iter_unpack(
            data[: len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size]
        )
    ]
    if answer == GIVEN and len(files) == 1:
        return files[0]
    for file in files:
        os.close(file)
    raise NotShared("refused")


def _map(file: int, num_bytes: int) -> mmap.mmap:
    """Maps a file that nobody can change any more. Raises NotShared."""
    found = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, GET_SEALS)
    except OSError:
        seals = 0  # no file in memory
    if not stat.S_ISREG(found.st_mode) or seals & SEALS != SEALS:
        raise NotShared("unsealed")
    if found.st_size != num_bytes or not num_bytes:
        raise NotShared("wrong_size")
    # Linux before 6.7 maps no sealed file as a shared one. Later it copies each page of a private
    # mapping that a device is to read.
    for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with contextlib.suppress(OSError, OverflowError, ValueError):
            return mmap.mmap(file, num_bytes, kind, mmap.PROT_READ)
    raise NotShared("no_file")
