"""Files of an adapter that lie in memory alone, as the pieces in which they came."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from adapter_store.checkpoint.reading.safetensors import Scanned, TensorRecord
from adapter_store.errors import CorruptData

MIN_PIECE_BYTES = 64 << 10
"""Smaller pieces are joined: each is an object of its own, which may be larger than its bytes."""


class MemoryFile:
    """A file that is only appended to, and read as a regular one. Small pieces are joined, large
    ones kept as they come, so that its memory is its contents', however these are cut. One thread
    appends; any number read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._pieces: list[bytes | memoryview] = []
        self._starts: list[int] = []
        self._tail = bytearray()

    def append(self, data: bytes | memoryview) -> None:
        """Keeps the data themselves, which must not change."""
        with self._lock:
            if len(data) >= MIN_PIECE_BYTES:
                self._end_tail()
                self._pieces.append(data)
                self._starts.append(self.size_bytes)
            else:
                self._tail += data
            self.size_bytes += len(data)
            if len(self._tail) >= MIN_PIECE_BYTES:
                self._end_tail()

    def _end_tail(self) -> None:
        if self._tail:
            self._starts.append(self.size_bytes - len(self._tail))
            self._pieces.append(bytes(self._tail))
            self._tail.clear()

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes. Raises CorruptData if the file is shorter."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes) from `offset`. Raises CorruptData if the file is shorter."""
        end = offset + len(buffer)
        if end > self.size_bytes:
            raise CorruptData(
                f"{self.name} ends at byte {self.size_bytes}, expected {end}", subject=self.name
            )
        while buffer:
            piece = self._read_piece(offset, len(buffer))
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def _read_piece(self, offset: int, length: int) -> memoryview:
        """Returns the bytes at `offset` in one piece, at most so many."""
        with self._lock:
            tail_start = self.size_bytes - len(self._tail)
            if offset >= tail_start:
                start = offset - tail_start
                return memoryview(bytes(self._tail[start : start + length]))
            index = bisect_right(self._starts, offset) - 1
            start = offset - self._starts[index]
            return memoryview(self._pieces[index])[start : start + length]

    def close(self) -> None:
        """Does nothing: the memory is free once nobody refers to it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Arrived(Protocol):
    """Facts about a file that were found while it arrived."""

    def scanned(self, records: Sequence[TensorRecord]) -> dict[str, Scanned] | None:
        """Returns the result of `scan_tensors` for these tensors; None if they have to be read."""


class MemoryFolder:
    """The files of one adapter in memory. Two are equal only if they are the same.

    It is a blob once it `is_kept`: who received it leaves it then. `on_release` is called when it
    is no blob any more, or becomes none. Its memory is free once nobody refers to it: an image that
    is being built is read to its end.
    """

    def __init__(
        self, files: Iterable[MemoryFile] = (), on_release: Callable[[], None] = lambda: None
    ) -> None:
        self._files = {file.name: file for file in files}
        self._on_release = on_release
        self._arrived: Arrived | None = None
        self.is_kept = False

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def release(self) -> None:
        """Gives back the place that is counted for the files; who has the folder reads on.
        Idempotent."""
        self._on_release()

    def get(self, name: str) -> MemoryFile | None:
        return self._files.get(name)

    def add(self, file: MemoryFile, arrived: Arrived | None = None) -> None:
        """Adds a complete file, and the known facts about its tensors."""
        self._files[file.name] = file
        self._arrived = arrived or self._arrived

    def scanned(self, records: Sequence[TensorRecord]) -> dict[str, Scanned] | None:
        """See Arrived.scanned."""
        return None if self._arrived is None else self._arrived.scanned(records)
