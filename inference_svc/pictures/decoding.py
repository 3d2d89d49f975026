"""Has strangers' pictures decoded by sandboxed processes, within bounds."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from inference_svc.pictures.processor import CHANNELS, Processor
from inference_svc.pictures.sizes import Size
from inference_svc.pictures.task import NUM_BYTES, TILES, packed
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.sandbox.pool import CannotStart, SandboxPool
from servicekit.sandbox.process import Limits, SandboxFailure, SandboxProcess, Task
from servicekit.shared_memory import SharedBytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_CHILDREN = 2
MAX_PIXELS = 32 << 20
"""The most pixels of a picture, which a process holds in a few copies of up to 4 bytes."""
MEMORY_BYTES = 1 << 30
"""The memory that decoding may take, beside a process's memory at start."""
CPU_SECONDS = 10.0
"""Several times as long as the slowest valid file takes."""
HEADER_CPU_SECONDS = 1.0
"""Many times as long as the header of a valid file takes."""
WALL_SECONDS = 60.0
"""So long that only a process that has hardly any turns exceeds it."""
RETRY_SECONDS = 1.0
MAX_REASON_BYTES = 1024
NICENESS = 10
"""Steps have about nine times as many turns on a processor that decoding takes, too."""
TASK = Task(
    Path(__file__).with_name("task.py"),
    Limits(
        MEMORY_BYTES,
        wall_seconds=WALL_SECONDS,
        answer_cpu_seconds=CPU_SECONDS,
        open_files=16,
        niceness=NICENESS,
    ),
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A decoded picture: uint8 [num_tiles, height, width, 3], which the engine's process maps, of
    tiles of the size `tile`. `rows` and `columns` are of a picture that is cut into tiles, of which
    one of the whole comes last; otherwise 0. `digest` is the sha256 of all of it: pictures that are
    computed alike have the same."""

    pixels: SharedBytes = field(repr=False, compare=False)
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
        self.pool = SandboxPool(TASK, NUM_CHILDREN, memory_bytes=processor.max_bytes)

    def close(self) -> None:
        """Ends the processes that are idle, and others once they have answered."""
        self.pool.close()

    def measure(
        self,
        data: bytes | memoryview,
        where: str,
        check_cancelled: Callable[[], None] = lambda: None,
        charge: Callable[[float], None] = lambda seconds: None,
    ) -> int:
        """Returns the most bytes that a file's tiles can have, by its header, which may take
        HEADER_CPU_SECONDS. Parameters and errors as of `decode`."""
        return self._ask(data, where, b"S", self._num_bytes, check_cancelled, charge)

    def decode(
        self,
        data: bytes | memoryview,
        where: str,
        check_cancelled: Callable[[], None] = lambda: None,
        charge: Callable[[float], None] = lambda seconds: None,
    ) -> Tiles:
        """Returns the tiles of a file's bytes, which the caller has bounded. `check_cancelled` is
        called periodically and may raise. `charge` is called with the processor time that a
        process has taken, also if it fails. Raises InvalidArgument that names `where` the file was
        sent, and Unavailable if this machine cannot start a process, has ended it, has no turns for
        it, or has no memory or files for the tiles."""
        return self._ask(data, where, b"T", self._tiles, check_cancelled, charge)

    def _ask(
        self,
        data: bytes | memoryview,
        where: str,
        kind: bytes,
        take: Callable[[bytes, SandboxProcess, str], T],
        check_cancelled: Callable[[], None],
        charge: Callable[[float], None],
    ) -> T:
        """Returns what `take` makes of the content of an answer of this kind, from which process,
        before the next file takes its memory."""
        try:
            with self.pool.process() as child, _charged(child, charge):
                assert child.memory is not None
                memory = child.memory.file if kind == b"T" else None
                limit_s = None
                if kind == b"S":
                    limit_s = HEADER_CPU_SECONDS
                    self._load(child, check_cancelled)
                answer = child.ask(
                    self._request(data, memory), MAX_REASON_BYTES, check_cancelled, limit_s
                )
                if answer.kind == b"M":  # raised in here, so that the next file has all the memory
                    raise _too_costly(where)
                if answer.kind == kind:
                    return take(answer.content, child, where)
        except (CannotStart, OSError) as error:
            raise Unavailable(
                f"{where}: images cannot be decoded now: {error}: try again",
                subject=where,
                retry_after_s=RETRY_SECONDS,
            ) from error
        except SandboxFailure as failure:
            logger.warning("the decoding of an image ended: %s", failure)
            if failure.is_own_work and kind == b"S":
                raise _header_too_long(where) from None
            raise _failed(failure, where) from None
        raise InvalidArgument(f"{where}: {answer.text}", subject=where)

    def _request(self, data: bytes | memoryview, memory: int | None = None) -> bytes:
        """Asks for a file's tiles in a memory, or without one for their size."""
        facts = {"processor": self._facts, "max_pixels": MAX_PIXELS, "memory": memory}
        return packed(facts, data)

    def _load(self, child: SandboxProcess, check_cancelled: Callable[[], None]) -> None:
        """Waits until a process is loaded, so that no header takes the time for it. Raises
        CannotStart."""
        if child.has_answered:
            return
        try:
            child.ask(self._request(b""), MAX_REASON_BYTES, check_cancelled)
        except SandboxFailure as failure:
            raise CannotStart(str(failure)) from failure

    def _num_bytes(self, content: bytes, child: SandboxProcess, where: str) -> int:
        """Returns the size that a process has found, whose answer may be anything. Raises
        InvalidArgument."""
        num_bytes = int.from_bytes(content, "big")
        if len(content) != NUM_BYTES.size or not 0 < num_bytes <= self._processor.max_bytes:
            raise _undecodable(where)
        return num_bytes

    def _tiles(self, content: bytes, child: SandboxProcess, where: str) -> Tiles:
        """Returns a copy of the tiles that a process has written, whose answer may be anything.
        Raises InvalidArgument, and OSError."""
        if len(content) != TILES.size:
            raise _undecodable(where)
        num_bytes, rows, columns, height, width = TILES.unpack(content)
        tile, num_tiles = Size(height, width), rows * columns + 1
        is_whole = num_bytes == num_tiles * CHANNELS * height * width
        makes = self._processor.makes(tile) and num_tiles <= self._processor.max_tiles
        if not (is_whole and makes):
            raise _undecodable(where)
        assert child.memory is not None
        pixels = SharedBytes.of("loadout-pixels", child.memory.view[:num_bytes])
        digest = hashlib.sha256(content + pixels.sha256).digest()
        return Tiles(pixels, tile, num_tiles, rows, columns, digest)


@contextmanager
def _charged(child: SandboxProcess, charge: Callable[[float], None]) -> Iterator[None]:
    start_s = child.cpu_seconds
    try:
        yield
    finally:
        charge(child.cpu_seconds - start_s)


def _failed(failure: SandboxFailure, where: str) -> InvalidArgument | Unavailable:
    """Returns the error for a file whose process has not answered."""
    if failure.is_own_work:
        return _too_costly(where)
    if not failure.is_killed and not failure.is_timeout:
        return _undecodable(where)
    return Unavailable(
        f"{where}: this server ran short of memory or processors, or was interrupted: try again",
        subject=where,
        retry_after_s=RETRY_SECONDS,
    )


def _too_costly(where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: takes more than {CPU_SECONDS:g} s of a processor or {MEMORY_BYTES >> 20} MiB "
        "to decode: send a smaller image",
        subject=where,
    )


def _header_too_long(where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: its header is too long: it takes more than {HEADER_CPU_SECONDS:g} s of a "
        "processor to read: save the image without metadata",
        subject=where,
    )


def _undecodable(where: str) -> InvalidArgument:
    return InvalidArgument(f"{where}: cannot be decoded", subject=where)
