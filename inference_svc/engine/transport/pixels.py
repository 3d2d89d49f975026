"""The pixels of pictures on their way to the engine's process: files, which follow a message.

A Submit pickles without the memory of its pictures. Both ends find in the messages of a frame which
files follow it on the same socket, in which order. A frame has the files of all its pixels: only
the other end knows which ones it still has mapped. It maps no file twice.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from inference_svc.engine.transport.messages import Output, Submit
from servicekit.errors import Unavailable
from servicekit.shared_memory import Mapped, SharedBytes

logger = logging.getLogger(__name__)

FILES_AT_ONCE = 64
"""Descriptors in one piece, of 253 that Linux takes."""
MARK = b"F"
"""The byte that descriptors ride on."""
RETRY_SECONDS = 0.005
"""The wait for the other end to receive files, of which the system keeps a limited number."""


def send_pixels(connection: socket.socket, messages: Iterable[Any]) -> None:
    """Sends the files of the pixels of messages, which were sent before. A piece whose files the
    system does not take goes without them: see `lost`. Raises ConnectionError once the other end is
    gone, and OSError if not even a byte can be sent."""
    files = [each.file for each in _pixels_of(messages)]
    for part in _parts(files):
        while not _send(connection, part):
            time.sleep(RETRY_SECONDS)


def receive_pixels(connection: socket.socket, messages: Iterable[Any], mapped: Mapped) -> None:
    """Maps the pixels of messages that were received before, once each for all frames, as far as
    this machine has files and memory for them: see `lost`. `mapped` are the ones of earlier frames.
    Raises EOFError or OSError once the other end is gone."""
    for part in _parts(_pixels_of(messages)):
        files = _receive(connection, len(part))
        for pixels, file in zip(part, files, strict=False):
            try:
                pixels.receive(file, mapped)
            except OSError as error:
                logger.error("pixels of an image cannot be mapped: %s", error)


def lost(message: Any) -> Output | None:
    """Returns the answer to a Submit whose pixels have not all arrived."""
    if not isinstance(message, Submit):
        return None
    if all(each.pixels.is_here for each in message.request.pictures):
        return None
    error = Unavailable("this server has no files or memory for the images now: try again")
    return Output(message.request.request_id, error=error)


def _pixels_of(messages: Iterable[Any]) -> list[SharedBytes]:
    """Returns the pixels that messages share, once each, in order. Those of one object here are of
    one object where the frame is loaded."""
    found: dict[int, SharedBytes] = {}
    for message in messages:
        if isinstance(message, Submit):
            for picture in message.request.pictures:
                found.setdefault(id(picture.pixels), picture.pixels)
    return list(found.values())


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), FILES_AT_ONCE):
        yield items[start : start + FILES_AT_ONCE]


def _send(connection: socket.socket, files: list[int]) -> bool:
    """Sends a piece. Returns False if too many files are on their way."""
    try:
        socket.send_fds(connection, [MARK], files)
    except ConnectionError:
        raise
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            return False
        logger.error("pixels of an image cannot be sent: %s", error)
        connection.sendall(MARK)
    return True


def _receive(connection: socket.socket, count: int) -> list[int]:
    """Returns so many descriptors, or fewer if this process may have no more, or the other end had
    to leave them out."""
    files = array.array("i")
    # Not for programs that another thread starts meanwhile: recv_fds ignores its flags.
    mark, given, _, _ = connection.recvmsg(
        1, socket.CMSG_LEN(count * files.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in given:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) // files.itemsize * files.itemsize])
    if mark != MARK:
        for file in files:
            os.close(file)
        raise EOFError
    return files.tolist()
