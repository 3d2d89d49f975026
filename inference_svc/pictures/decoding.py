"""Has strangers' pictures decoded by sandboxed processes, within bounds."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from inference_svc.pictures.processor import CHANNELS, Processor
from inference_svc.pictures.sizes import Size
from inference_svc.pictures.task import NUM_NUMBERS, NUMBER_BYTES
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.sandbox.pool import CannotStart, SandboxPool
from servicekit.sandbox.process import Limits, SandboxFailure, Task

logger = logging.getLogger(__name__)

NUM_CHILDREN = 2
MAX_PIXELS = 32 << 20
"""The most pixels of a picture, which a process holds in a few copies of up to 4 bytes."""
MEMORY_BYTES = 1 << 30
"""The memory that decoding may take, beside a process's memory at start."""
SECONDS = 10.0
"""Several times as long as the slowest valid file takes on a quiet machine."""
RETRY_SECONDS = 1.0
MAX_REASON_BYTES = 1024
HEAD_BYTES = NUM_NUMBERS * NUMBER_BYTES
TASK = Task(
    Path(__file__).with_name("task.py"),
    Limits(MEMORY_BYTES, wall_seconds=SECONDS, open_files=16),
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A decoded picture: uint8 [num_tiles, height, width, 3] as bytes, of tiles of the size `tile`.
    `rows` and `columns` are of a picture that is cut into tiles, of which one of the whole comes
    last; otherwise 0. `digest` is the sha256 of all of it: pictures that are computed alike have
    the same."""

    pixels: bytes = field(repr=False)
    tile: Size
    num_tiles: int
    rows: int
    columns: int
    digest: bytes


class PictureDecoder:
    """Decodes pictures for one `processor`, a few at a time. Blocking and thread-safe."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._facts = processor.to_json()
        self.pool = SandboxPool(TASK, NUM_CHILDREN)

    def close(self) -> None:
        """Ends the processes that are idle, and others once they have answered."""
        self.pool.close()

    def decode(
        self, data: bytes, where: str, check_cancelled: Callable[[], None] = lambda: None
    ) -> Tiles:
        """Returns the tiles of a file's bytes, which the caller has bounded. `check_cancelled` is
        called periodically and may raise. Raises InvalidArgument that names `where` the file was
        sent, and Unavailable if this machine cannot start a process, or has ended it."""
        request = {
            "data": base64.b64encode(data).decode(),
            "processor": self._facts,
            "max_pixels": MAX_PIXELS,
        }
        most = HEAD_BYTES + self._processor.max_bytes
        try:
            with self.pool.process() as child:
                answer = child.ask(request, max(most, MAX_REASON_BYTES), check_cancelled)
                if answer.kind == b"M":  # raised in here, so that the next file has all the memory
                    raise _too_costly(where)
        except CannotStart as error:
            raise Unavailable(f"images cannot be decoded now: {error}") from error
        except SandboxFailure as failure:
            logger.warning("the decoding of an image ended: %s", failure)
            raise _failed(failure, where) from None
        if answer.kind != b"T":
            raise InvalidArgument(f"{where}: {answer.text}", subject=where)
        return self._checked(answer.content, where)

    def _checked(self, content: bytes, where: str) -> Tiles:
        """Returns the tiles of an answer, which may be anything. Raises InvalidArgument."""
        places = range(0, HEAD_BYTES, NUMBER_BYTES)
        numbers = (int.from_bytes(content[at : at + NUMBER_BYTES], "big") for at in places)
        rows, columns, height, width = numbers
        pixels, tile, num_tiles = content[HEAD_BYTES:], Size(height, width), rows * columns + 1
        is_whole = len(pixels) == num_tiles * CHANNELS * height * width
        makes = self._processor.makes(tile) and num_tiles <= self._processor.max_tiles
        if not (is_whole and makes):
            raise _undecodable(where)
        return Tiles(pixels, tile, num_tiles, rows, columns, hashlib.sha256(content).digest())


def _failed(failure: SandboxFailure, where: str) -> InvalidArgument | Unavailable:
    """Returns the error for a file whose process has not answered."""
    if failure.is_killed:
        return Unavailable(
            f"{where}: this server ran short of memory, or was interrupted: try again",
            subject=where,
            retry_after_s=RETRY_SECONDS,
        )
    return _too_costly(where) if failure.is_timeout else _undecodable(where)


def _too_costly(where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: takes more than {SECONDS:g} s or {MEMORY_BYTES >> 20} MiB to decode: "
        "send a smaller image",
        subject=where,
    )


def _undecodable(where: str) -> InvalidArgument:
    return InvalidArgument(f"{where}: cannot be decoded", subject=where)
