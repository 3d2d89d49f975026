"""Hashes and checks tensors while their file arrives, so that it need not be read again.

Only valid files are read early. Any other file is left to the later checks, which report its
faults.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.memory_files import MemoryFile
from adapter_store.checkpoint.reading.safetensors import (
    LENGTH_BYTES,
    Scanned,
    TensorRecord,
    parse_header,
)
from adapter_store.checkpoint.reading.scan import largest_of
from adapter_store.errors import InvalidAdapter

_LIMITS = CheckpointLimits()


class ArrivingTensors:
    """The known facts about the tensors of one .safetensors file in memory; call `advance` after
    each piece. One thread at a time."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file
        self._position = 0
        """Where the bytes begin that were not looked at; 0 until the header is there."""
        self._records: tuple[TensorRecord, ...] | None = None
        self._waiting: deque[TensorRecord] = deque()
        self._scanned: dict[str, Scanned] = {}
        self._sha256, self._largest = hashlib.sha256(), 0.0
        self._is_given_up = False

    def advance(self, piece: bytes | memoryview) -> None:
        """Looks at the file's newest bytes, which are `piece`."""
        if self._is_given_up:
            return
        data = memoryview(piece)
        if not self._position:
            if not self._read_header():
                return
            behind = self._file.size_bytes - self._position
            data = data[len(data) - behind :] if behind else data[:0]
        while data and not self._is_given_up:
            if not self._waiting:
                self._is_given_up = True  # bytes behind the last tensor
                return
            data = data[self._take(self._waiting[0], data) :]

    def scanned(self, records: Sequence[TensorRecord]) -> dict[str, Scanned] | None:
        """Returns the result of `scan_tensors`; None if the tensors have to be read."""
        if self._is_given_up or self._waiting or self._records is None:
            return None
        return dict(self._scanned) if tuple(records) == self._records else None

    def _read_header(self) -> bool:
        """Reads the header, once it is there; returns whether it has."""
        file = self._file
        if file.size_bytes < LENGTH_BYTES:
            return False
        header_bytes = int.from_bytes(file.read_at(0, LENGTH_BYTES), "little")
        if header_bytes > _LIMITS.max_header_bytes:
            self._is_given_up = True
            return False
        start = LENGTH_BYTES + header_bytes
        if file.size_bytes < start:
            return False
        try:
            records = parse_header(
                file.read_at(LENGTH_BYTES, header_bytes),
                start,
                file.name,
                max_tensors=_LIMITS.max_tensors,
            )
        except InvalidAdapter:
            self._is_given_up = True
            return False
        end = start
        for record in records:
            self._is_given_up |= record.offset != end
            end = record.offset + record.length_bytes
        self._records, self._waiting, self._position = records, deque(records), start
        return True

    def _take(self, record: TensorRecord, data: memoryview) -> int:
        """Returns how many of these bytes, which are the next, are the tensor's."""
        done = self._position - record.offset
        count = min(record.length_bytes - done, len(data))
        self._sha256.update(data[:count])
        self._position += count
        self._look_at_values(record, done, data[:count])
        if done + count == record.length_bytes:
            self._scanned[record.key] = Scanned(self._sha256.digest(), self._largest)
            self._sha256, self._largest = hashlib.sha256(), 0.0
            self._waiting.popleft()
        return count

    def _look_at_values(self, record: TensorRecord, done: int, data: memoryview) -> None:
        """Looks at the values of which these bytes, the tensor's from `done` on, have the last."""
        itemsize = record.dtype.itemsize
        begun, left = done % itemsize, (done + len(data)) % itemsize
        first = (itemsize - begun) % itemsize
        if begun and len(data) >= first:  # a value that lies in two pieces
            split = self._file.read_at(record.offset + done - begun, itemsize)
            self._note_largest(split, record)
        whole = data[first : len(data) - left] if len(data) >= first + left else data[:0]
        if whole:
            self._note_largest(whole, record)

    def _note_largest(self, data: bytes | memoryview, record: TensorRecord) -> None:
        found = largest_of(np.frombuffer(data, np.uint8), record.dtype)
        self._is_given_up |= not math.isfinite(found)
        self._largest = max(self._largest, found)
