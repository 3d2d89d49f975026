"""Checks the parts of an image where they were written, in threads that hash several at once."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from contract.images.header import LayerEnd
from inference_svc.adapters.pulls.pull import Progress
from inference_svc.errors import CorruptImage

T = TypeVar("T")
Pause = Callable[[int], None]
"""Waits as long as it should after so many bytes."""

INLINE_BYTES = 256 << 10
"""Smaller parts are hashed at once: handing one to another thread takes as long."""
MAX_PENDING = 4
"""Parts of one pull that wait for their hash, while further ones are written."""


class PartHashers:
    """Threads that hash parts, of all pulls."""

    def __init__(self, num_threads: int, begin_thread: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(
            num_threads, thread_name_prefix="loadout-hash", initializer=begin_thread
        )

    def submit(
        self, pieces: Iterable[memoryview], num_bytes: int, pause: Pause | None = None
    ) -> Future[bytes]:
        """Returns the sha256 of the bytes of one part, whose pieces are taken one by one. With
        pauses they are taken in the calling thread: other images wait for these threads."""
        if pause is None and num_bytes >= INLINE_BYTES:
            return self._pool.submit(_hash, pieces)
        done: Future[bytes] = Future()
        done.set_result(_hash(pieces, pause))
        return done

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Does other work of a pull beside the hashes."""
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown()


class _Pending(NamedTuple):
    end: LayerEnd
    sha256: Future[bytes]


class PartChecks:
    """The parts of one attempt that are in their place and not verified yet. In its context
    `progress` has only verified ones, and at its end nothing is read or copied any more. `pieces`
    iterates over the image's bytes from one offset to another, in the thread that hashes them."""

    def __init__(
        self,
        progress: Progress,
        hashers: PartHashers,
        pieces: Callable[[int, int], Iterable[memoryview]],
    ) -> None:
        self._progress = progress
        self._hashers = hashers
        self._pieces = pieces
        self._pending: deque[_Pending] = deque()
        self._start = progress.offset

    def add(self, end: LayerEnd, position: int, pause: Pause | None = None) -> None:
        """Ends a part, of which everything up to `position` is written, or is copied when it is
        hashed; see `PartHashers.submit`. Raises CorruptImage, also for an earlier part."""
        progress = self._progress
        assert progress.header is not None
        if end.end_offset != position:
            raise _corrupt(end)
        num_parts = len(progress.part_hashes) + len(self._pending)
        if position <= self._start or num_parts >= len(progress.header.segments):
            raise CorruptImage(f"part {end.part} of the image has no segment")
        pieces = self._pieces(self._start, position)
        sha256 = self._hashers.submit(pieces, position - self._start, pause)
        self._pending.append(_Pending(end, sha256))
        self._start = position
        while self._pending and (
            len(self._pending) > MAX_PENDING or self._pending[0].sha256.done()
        ):
            self._verify()

    def finish(self) -> None:
        """Verifies all parts. Raises CorruptImage."""
        while self._pending:
            self._verify()

    def _verify(self) -> None:
        """Verifies the next part. Raises CorruptImage."""
        end, sha256 = self._pending[0]
        if sha256.result() != end.sha256:
            raise _corrupt(end)
        self._pending.popleft()
        self._progress.part_hashes.append(end.sha256)
        self._progress.offset = end.end_offset

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Counts the parts that are right up to the first that is not."""
        for pending in self._pending:
            pending.sha256.exception()  # waits: their memory may be others' soon
        while self._pending and _is_right(self._pending[0]):
            self._verify()


def _hash(pieces: Iterable[memoryview], pause: Pause | None = None) -> bytes:
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
        if pause is not None:
            pause(len(piece))
    return hasher.digest()


def _is_right(part: _Pending) -> bool:
    return part.sha256.exception() is None and part.sha256.result() == part.end.sha256


def _corrupt(end: LayerEnd) -> CorruptImage:
    return CorruptImage(f"part {end.part} of the image fails its sha256")
