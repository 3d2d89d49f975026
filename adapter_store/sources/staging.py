"""The folder where an adapter's files arrive: limited while written, durable soon after."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from adapter_store.checkpoint.formats.select import check_file_names
from adapter_store.checkpoint.reading.arriving import ArrivingTensors
from adapter_store.checkpoint.reading.files import Folder, check_text_file
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.core import SourceFile
from adapter_store.errors import CallerGone, InvalidAdapter, LimitExceeded
from contract.adapter_files import (
    CONFIG_FILE,
    MAX_FILES,
    PICKLE_FILE,
    WEIGHTS_FILE,
    checkpoint_step,
    is_adapter_file,
    is_plain_name,
    is_text_file,
)
from contract.folders import shown
from contract.words import listed
from servicekit.errors import Draining, InvalidArgument, QuotaExceeded, ShareExceeded
from servicekit.shares import Shares

READ_BYTES = 4 << 20
"""How much of a source is read at a time."""

CONCURRENT_HASH_BYTES = 256 << 10
"""From this size on, data is hashed in a thread while it is being written."""

CONFIG_BYTES = 1 << 20
"""The bytes that a tenant may stage beyond its quota, which counts weights only."""

FILES_AT_ONCE = 4
"""How many files of an adapter are fetched, and hashed, at the same time."""

AddressOf: TypeAlias = Callable[[str], str]
"""Returns the URI of a folder in a source."""

_PICKLE = re.compile(r"adapter_model.*\.(bin|pt|pth|pkl|ckpt)")
"""How many folders with adapters a refusal lists."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one adapter. Pickled weights are fetched only if the operator allows them."""

    max_adapter_bytes: int
    max_file_bytes: int
    allow_pickle_files: bool = False


class Abandoned(Exception):
    """Raised because the fetch has ended, maybe by the failure of another file: this one is not
    needed."""


class StagedBytes:
    """The part of the place for staged bytes that one adapter's files take, counted for its tenant.
    All that the tenant stages is bounded by its quota, too. `make_room` has the functions that free
    some of the tenant's, and of all tenants': called before a caller is refused, the latter only
    where the whole place is full. Thread-safe."""

    def __init__(
        self,
        shares: Shares,
        account: str,
        max_bytes: int | None = None,
        make_room: tuple[Callable[[], object], Callable[[], object]] | None = None,
    ) -> None:
        self._shares = shares
        self._account = account
        self._max_bytes = max_bytes
        self._make_room = make_room
        self._held = shares.reserve(account, 0)
        self._text_bytes = 0

    def add(self, num_bytes: int, *, is_text: bool = False) -> None:
        """Raises ShareExceeded and QuotaExceeded before these bytes may be written. A tokenizer's
        files do not count against the quota: the kept ones do."""
        self._grow(num_bytes)
        self._text_bytes += num_bytes if is_text else 0
        staged_bytes = self._shares.used_by(self._account) - self._text_bytes
        if self._max_bytes is not None and staged_bytes > self._max_bytes + CONFIG_BYTES:
            raise QuotaExceeded(
                f"max_bytes: {self._account} has {staged_bytes} bytes of uploads and fetches in "
                f"progress, over its quota of {self._max_bytes}",
                subject="max_bytes",
            )

    def _grow(self, num_bytes: int) -> None:
        if self._make_room is None:
            self._held.grow(num_bytes)
            return
        of_tenant, of_all = self._make_room
        with suppress(ShareExceeded):
            self._held.grow(num_bytes)
            return
        of_tenant()
        if self._shares.used + num_bytes > self._shares.capacity:
            of_all()
        self._held.grow(num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Gives back all but this much."""
        self._held.shrink(num_bytes)

    def release(self) -> None:
        self._held.release()


@dataclass(frozen=True, slots=True)
class Stop:
    """The reasons that end a fetch early: the store's shutdown, or the caller's leaving."""

    draining: threading.Event = field(default_factory=threading.Event)
    caller_gone: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises Draining or CallerGone."""
        if self.draining.is_set():
            raise Draining("this store is shutting down")
        if self.caller_gone.is_set():
            raise CallerGone("the caller left before its source was fetched")


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
        with self._staging.local_work():
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
    """One in the folder, which becomes durable once it is closed: see `Staging.wait_durable`."""

    def __init__(self, staging: Staging, path: Path) -> None:
        super().__init__(staging, path.name)
        self._path = path
        self._file: FileIO | None = open(path, "xb", buffering=0)  # noqa: SIM115 (see suspend)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises as StagedFile.write, and DiskFull."""
        self._staging.check_space(len(data))
        self._staging.count(self.name, self.size_bytes, len(data), is_kept=True)
        with self._staging.local_work():
            if len(data) < CONCURRENT_HASH_BYTES:
                self._sha256.update(data)
                self._write(data)
            else:
                hashing = self._staging.start_hashing(self._sha256.update, data)
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
        self._staging.start_sync(self._path)
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
        self._stop = stop or Stop()
        self._staged = staged
        self.check_space = check_space
        self.total_bytes = 0
        self._received_bytes = 0
        self._limits = limits
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._files: list[SourceFile] = []
        self._syncs: list[Future[None]] = []
        # Its threads start with the first large write, or the first file that is complete.
        self._threads = ThreadPoolExecutor(FILES_AT_ONCE, "staging")
        self._num_working = 0
        self._worked_s = 0.0
        self._work_start_s = 0.0

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
            self._abandoned.set()

    def remove(self) -> None:
        """Removes the files, unless they have become a blob, and gives back the staged bytes.
        Idempotent."""
        self.abandon()
        self._threads.shutdown(wait=False)
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

    def start_hashing(self, update: Callable[[bytes], None], data: Any) -> Future[None]:
        """Calls a hash's `update` with data in a thread. Raises as `check_cancelled`, and
        RuntimeError if there are no more threads."""
        return self._start(update, data)

    def start_sync(self, path: Path) -> None:
        """Makes a complete file durable in a thread: it is read meanwhile. Raises as
        `start_hashing`."""
        syncing = self._start(self._sync, path)
        with self._lock:
            self._syncs.append(syncing)

    def wait_durable(self) -> None:
        """Returns when all complete files are durable. Raises OSError."""
        with self._lock:
            syncs = [*self._syncs]
        for syncing in syncs:
            syncing.result()

    def _sync(self, path: Path) -> None:
        with self.local_work():
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _start(self, work: Callable[[Any], None], subject: Any) -> Future[None]:
        try:
            return self._threads.submit(work, subject)
        except RuntimeError:
            self.check_cancelled()
            raise

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Counts the time in the context as this store's own: see `local_seconds`."""
        with self._lock:
            if not self._num_working:
                self._work_start_s = time.monotonic()
            self._num_working += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_working -= 1
                if not self._num_working:
                    self._worked_s += time.monotonic() - self._work_start_s

    @property
    def local_seconds(self) -> float:
        """How long files have been written, hashed and synced: whoever sends them was not waited
        for."""
        with self._lock:
            now_s = time.monotonic() if self._num_working else self._work_start_s
            return self._worked_s + now_s - self._work_start_s

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
        self._stop.draining.wait(seconds)
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
        self._stop.check()
        if self._abandoned.is_set():
            raise Abandoned

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


def check_file_name(name: str, subject: str) -> str:
    """Returns a plain file name, which cannot lead out of a folder. Raises InvalidArgument."""
    if not is_plain_name(name):
        raise InvalidArgument(f"{name[:160]!r} is not a plain file name", subject=subject)
    return name


def find_checkpoints(names: Iterable[str]) -> list[str]:
    """Returns the names that trainers give to checkpoints. A refusal has no others, because other
    files in a folder may be another tenant's."""
    return [name for name in names if checkpoint_step(name) is not None]


def choose_files(
    names: Iterable[str],
    where: str,
    below: Iterable[str] = (),
    address_of: AddressOf | None = None,
    *,
    allow_pickle: bool = False,
) -> list[str]:
    """Returns which of a folder's files make up the adapter, with its tokenizer's and its chat
    template's; `where` names the folder in errors.

    `below` are folders in it that may be adapters, which a refusal suggests as sources of their
    own; `address_of` returns the URI of one, by default its path below `where`.

    A pickle is chosen only if there is nothing better and `allow_pickle`.

    Raises InvalidAdapter if there is no config, no weights that may be read, or contents that would
    have to be applied and are not.
    """
    available = set(names)
    chosen = sorted(name for name in available if is_adapter_file(name))
    texts = sorted(name for name in available if is_text_file(name))
    if CONFIG_FILE not in chosen:
        raise InvalidAdapter(
            f"{where}: {CONFIG_FILE} is missing{_suggest(below, where, address_of)}",
            subject=CONFIG_FILE,
            reason="FILE_MISSING",
        )
    if len(chosen) == 1:
        if allow_pickle and PICKLE_FILE in available:
            check_file_names(available)
            return [CONFIG_FILE, PICKLE_FILE, *texts]
        raise _no_weights(available, where)
    if len(chosen) > MAX_FILES:
        raise LimitExceeded(
            f"{where}: {len(chosen)} files are more than {MAX_FILES}", subject=WEIGHTS_FILE
        )
    check_file_names(available)
    return [*chosen, *texts]


def _suggest(below: Iterable[str], where: str, address_of: AddressOf | None) -> str:
    """Returns a refusal's text about adapters in a folder, the newest checkpoint first."""
    found = sorted(below, key=_step, reverse=True)
    if not found:
        return ""
    place = address_of(found[0]) if address_of else f"{where.rstrip('/')}/{found[0]}"
    return f"; below it are {listed(found, 'others')}: register one of them, such as {place}"


def _step(folder: str) -> tuple[int, str]:
    step = checkpoint_step(folder)
    return (-1 if step is None else step), folder


def _no_weights(available: set[str], where: str) -> InvalidAdapter:
    pickle = min((name for name in available if _PICKLE.fullmatch(name)), default=None)
    if pickle is None:
        return InvalidAdapter(
            f"{where}: {WEIGHTS_FILE} is missing", subject=WEIGHTS_FILE, reason="FILE_MISSING"
        )
    pickle = shown(pickle)  # any bytes may be a name
    return InvalidAdapter(
        f"{where}: {pickle} is a pickle, which can run code when it is read; "
        f"save the adapter as {WEIGHTS_FILE}, or have the store's operator allow it with "
        "--allow-pickle-files",
        subject=pickle,
        reason="FILE_NOT_SAFETENSORS",
    )
