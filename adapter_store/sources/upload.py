"""Uploads: an adapter whose files the caller sends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from adapter_store.errors import LimitExceeded, UploadStalled
from adapter_store.sources.choice import check_file_name
from adapter_store.sources.staging import StagedFile, Staging
from contract.adapter_files import MAX_FILES
from servicekit.errors import InvalidArgument
from servicekit.pace import Pace

UPLOAD_URI = "upload://"
"""The recorded source of an upload."""


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Bytes of one file from `offset`. The chunks of a file come in order."""

    file_name: str
    offset: int
    data: bytes | memoryview = field(repr=False)


class Upload:
    """Writes chunks into a staging folder, with one file open at a time. Blocks; thread-safe, one
    chunk at a time.

    Ends with `finish` or `abandon`; the creator of the folder removes it.
    """

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._files: dict[str, StagedFile] = {}
        self._last: StagedFile | None = None
        """The file that was written last, the only open one."""
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether it has to be finished or abandoned."""
        return self._is_open

    def write(self, chunk: FileChunk) -> None:
        """Raises InvalidArgument (bad name, offset out of order) and LimitExceeded."""
        with self._lock:
            if self._is_open:
                self._write(chunk)

    def finish(self) -> None:
        """Ends the files. Raises InvalidAdapter if they do not make up an adapter."""
        with self._lock:
            chosen = self.staging.choose_files(self._sizes, "upload")
            for name, file in self._files.items():
                if name in chosen:
                    file.close()
                else:
                    file.suspend()
                    self.staging.remove_file(name)
            self._is_open = False

    def abandon(self) -> None:
        """Closes the open file; later writes do nothing."""
        with self._lock:
            self._is_open = False
            self._suspend_last()

    def _write(self, chunk: FileChunk) -> None:
        name = check_file_name(chunk.file_name, "chunk.file_name")
        if name not in self._sizes:
            self._add(name)
        if chunk.offset != self._sizes[name]:
            raise InvalidArgument(
                f"chunk.offset: {name} continues at {self._sizes[name]}, not at {chunk.offset}",
                subject="chunk.offset",
            )
        file = self._files.get(name)
        if file is not None:
            if file is not self._last:
                self._suspend_last()
                self._last = file
            file.write(chunk.data)
        else:
            self.staging.count(name, chunk.offset, len(chunk.data))
        self._sizes[name] += len(chunk.data)

    def _suspend_last(self) -> None:
        if self._last is not None:
            self._last.suspend()

    def _add(self, name: str) -> None:
        if len(self._sizes) == MAX_FILES:
            raise LimitExceeded(
                f"chunk.file_name: {name} is one file more than {MAX_FILES}",
                subject="chunk.file_name",
            )
        if self.staging.accepts(name):
            self._suspend_last()
            self._last = self._files[name] = self.staging.create(name)
        self._sizes[name] = 0


def upload_stalled(pace: Pace) -> UploadStalled:
    return UploadStalled(
        f"the upload has sent nothing for {pace.stall_seconds:g} seconds, or less than "
        f"{pace.bytes_per_second} bytes per second for too long (settings "
        "transfer-stall-seconds and min-transfer-rate)"
    )
