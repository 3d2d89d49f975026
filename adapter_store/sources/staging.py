"""The folder where an adapter's files arrive: limited while written, durable soon after."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from adapter_store.checkpoint.reading.arriving import ArrivingTensors
from adapter_store.checkpoint.reading.files import Folder, check_text_file
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.core import SourceFile
from adapter_store.errors import LimitExceeded
from adapter_store.sources.choice import AddressOf, check_file_name, choose_files
from adapter_store.sources.limits import Cancellation, FetchLimits, StagedBytes, Stop
from adapter_store.sources.staging_work import StagingWork
from contract.adapter_files import PICKLE_FILE, WEIGHTS_FILE, is_adapter_file, is_text_file

READ_BYTES = 4 << 20
"""How much of a source is read at a time."""

CONCURRENT_HASH_BYTES = 256 << 10
"""From this size on, data is hashed in a thread while it is being written."""


FILES_AT_ONCE = 4
"""How many files of an adapter are fetched, and hashed, at the same time."""


class StagedFile:
    """A file being written, here in memory. Leaving the context closes it, unless an exception is
    raised. While nothing is written it may be closed: see `suspend`."""

    def __init__(self, staging: Staging, name: str) -> None:
        self._staging = staging
        self._sha256 = hashlib.sha256()
        self._memory = MemoryFile(name)
        self._arriving = ArrivingTensors(self._memory) if name == WEIGHTS_FILE else None
        self.name = name
        self.size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises LimitExceeded before the first byte over a limit is written, and ShareExceeded."""
        self._staging.count(self.name, self.size_bytes, len(data), is_kept=True)
        with self._staging.work.local():
            self._sha256.update(data)
            piece: bytes | memoryview
            if isinstance(data, memoryview) and data.readonly:
                piece = data  # of data that cannot change: kept as it came
            else:
                piece = bytes(data)
            self._memory.append(piece)
            if self._arriving is not None:
                self._arriving.advance(piece)
        self.size_bytes += len(data)

    def suspend(self) -> None:
        """Closes the file for now; `write` and `close` open it again."""

    def close(self) -> None:
        """Ends the file."""
        memory = self._staging.memory
        assert memory is not None
        memory.add(self._memory, self._arriving)
        self._add()

    def _add(self) -> None:
        self._staging.add(SourceFile(self.name, self.size_bytes, self._sha256.hexdigest()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.suspend()


class StagedDiskFile(StagedFile):
    """One in the folder, durable some time after it is closed: see `StagingWork.wait_durable`."""

    def __init__(self, staging: Staging, path: Path) -> None:
        super().__init__(staging, path.name)
        self._path = path
        self._file: FileIO | None = open(path, "xb", buffering=0)  # noqa: SIM115 (see suspend)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises as StagedFile.write, and DiskFull."""
        self._staging.check_space(len(data))
        self._staging.count(self.name, self.size_bytes, len(data), is_kept=True)
        with self._staging.work.local():
            if len(data) < CONCURRENT_HASH_BYTES:
                self._sha256.update(data)
                self._write(data)
            else:
                hashing = self._staging.work.start_hashing(self._sha256.update, data)
                try:
                    self._write(data)
                finally:
                    hashing.result()
        self.size_bytes += len(data)

    def suspend(self) -> None:
        """Closes the file for now; `write` and `close` open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Ends the file, and starts to make it durable."""
        self.suspend()
        self._staging.work.start_sync(self._path)
        self._add()

    def _opened(self) -> FileIO:
        if self._file is None:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._file = FileIO(fd, "w")
        return self._file

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        file, view = self._opened(), memoryview(data)
        while view:
            view = view[file.write(view) :]


class Staging:
    """A folder for the files of one adapter, until `remove`.

    Thread-safe, each file within one thread at a time. After `stop`, writing and waiting raise why.
    `staged` has the written files; `check_space` raises before the volume would be full. With
    `in_memory` nothing but a tokenizer's files lies in the folder.
    """

    def __init__(
        self,
        folder: Path,
        limits: FetchLimits,
        stop: Stop | None = None,
        staged: StagedBytes | None = None,
        check_space: Callable[[int], None] = lambda num_bytes: None,
        *,
        in_memory: bool = False,
    ) -> None:
        self.folder = folder
        self.memory: MemoryFolder | None = None
        if in_memory:
            self.memory = MemoryFolder(
                on_release=lambda: None if staged is None else staged.release()
            )
        self.cancellation = Cancellation(stop or Stop())
        self._staged = staged
        self.check_space = check_space
        self.total_bytes = 0
        self._received_bytes = 0
        self._limits = limits
        self._lock = threading.Lock()
        self._files: list[SourceFile] = []
        self.work = StagingWork(FILES_AT_ONCE, self.cancellation.check)

    @property
    def contents(self) -> Folder:
        """Where the adapter's files are."""
        return self.folder if self.memory is None else self.memory

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files that are complete, by name."""
        with self._lock:
            return tuple(sorted(self._files, key=lambda file: file.name))

    def add(self, file: SourceFile) -> None:
        """Adds a file that has become complete."""
        with self._lock:
            self._files.append(file)

    def replace_file(self, name: str, file: SourceFile) -> None:
        """Records that file `name` has become `file`."""
        with self._lock:
            self._files = [other for other in self._files if other.name != name]
        self.add(file)

    def drop_texts(self) -> None:
        """Removes the files of tokenizer and chat template: they are read, and no part of the
        blob."""
        for file in self.files:
            if is_text_file(file.name):
                (self.folder / file.name).unlink()
        with self._lock:
            self._files = [file for file in self._files if not is_text_file(file.name)]

    def abandon(self) -> None:
        """Makes other threads that still write or wait raise Abandoned. Afterwards no file is
        created."""
        with self._lock:
            self.cancellation.abandoned.set()

    def remove(self) -> None:
        """Removes the files, unless they have become a blob, and gives back the staged bytes.
        Idempotent."""
        self.abandon()
        self.work.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.memory is not None and self.memory.is_kept:
            if self._staged is not None:
                self._staged.keep(sum(file.size_bytes for file in self._files))
            return
        if self.memory is not None:
            self.memory.release()
        if self._staged is not None:
            self._staged.release()

    def remove_file(self, name: str) -> None:
        """Removes a file that is no part of the adapter after all."""
        if self._is_in_memory(name):
            return  # it is added when it is closed
        (self.folder / name).unlink()

    def choose_files(
        self,
        names: Iterable[str],
        where: str,
        below: Iterable[str] = (),
        address_of: AddressOf | None = None,
    ) -> list[str]:
        """Returns which of a folder's files to fetch. See the function of this name."""
        return choose_files(names, where, below, address_of, allow_pickle=self.allows_pickle)

    @property
    def allows_pickle(self) -> bool:
        """Whether pickled weights are accepted; files in memory are not converted."""
        return self._limits.allow_pickle_files and self.memory is None

    def accepts(self, name: str) -> bool:
        """Returns whether a file of this name may be part of an adapter."""
        return (
            is_adapter_file(name)
            or is_text_file(name)
            or (self.allows_pickle and name == PICKLE_FILE)
        )

    def check_sizes(self, sizes_bytes: Mapping[str, int]) -> None:
        """Checks files' sizes before any of them is read. Raises LimitExceeded."""
        total_bytes = self.total_bytes
        for name, size_bytes in sorted(sizes_bytes.items()):
            total_bytes += size_bytes
            self._check(name, size_bytes, total_bytes)

    @property
    def progress_bytes(self) -> int:
        """The bytes that have arrived, those not written yet included."""
        return max(self.total_bytes, self._received_bytes)

    def received(self, num_bytes: int) -> None:
        """Notes bytes that have arrived, to be written later. Raises as `check_cancelled`."""
        self.check_cancelled()
        with self._lock:
            self._received_bytes += num_bytes

    def wait(self, seconds: float) -> None:
        """Sleeps, unless the store is shutting down. Raises as `check_cancelled`."""
        self.cancellation.stop.draining.wait(seconds)
        self.check_cancelled()

    def create(self, name: str, expected_bytes: int = 0) -> StagedFile:
        """Opens a new file. Raises LimitExceeded at once if `expected_bytes` are too many, or more
        than the volume has, and as `check_cancelled`."""
        path = self.folder / check_file_name(name, name)
        with self._lock:  # a fetch that was left must create nothing while `remove` runs
            self.check_cancelled()
            self._check(name, expected_bytes, self.total_bytes + expected_bytes)
            if self._is_in_memory(name):
                return StagedFile(self, name)
            self.check_space(expected_bytes)
            return StagedDiskFile(self, path)

    def _is_in_memory(self, name: str) -> bool:
        return self.memory is not None and not is_text_file(name)

    def count(self, name: str, size_bytes: int, new_bytes: int, *, is_kept: bool = False) -> None:
        """Accounts for `new_bytes` more of a file of `size_bytes`, also of a file that is not kept
        on disk."""
        self.check_cancelled()
        with self._lock:
            self._check(name, size_bytes + new_bytes, self.total_bytes + new_bytes)
            if is_kept and self._staged is not None:
                self._staged.add(new_bytes, is_text=is_text_file(name))
            self.total_bytes += new_bytes

    def check_cancelled(self) -> None:
        """Raises Draining, CallerGone or Abandoned if this folder is no longer needed."""
        self.cancellation.check()

    def _check(self, name: str, file_bytes: int, total_bytes: int) -> None:
        if is_text_file(name):
            check_text_file(name, file_bytes)
        if file_bytes > self._limits.max_file_bytes:
            raise LimitExceeded(
                f"{name}: {file_bytes} bytes or more are over this store's limit of "
                f"{self._limits.max_file_bytes} bytes for one file",
                subject=name,
            )
        if total_bytes > self._limits.max_adapter_bytes:
            raise LimitExceeded(
                f"{name}: with it the adapter has {total_bytes} bytes or more, over this store's "
                f"limit of {self._limits.max_adapter_bytes}",
                subject=name,
            )
