"""An adapter's files as the store reads them: from a folder of its own, from memory, or from a
folder that the user of a command has named. A copy that was changed is written here, too."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adapter_store.checkpoint.reading.json import parse_object, show
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.errors import CorruptData, InvalidAdapter, LimitExceeded
from contract.adapter_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    MAX_FILES,
    MAX_HEADER_BYTES,
    TEXT_FILES,
    check_size,
    is_shard,
    is_text_file,
    size_advice,
)
from contract.folders import (
    FileChanged,
    FileDenied,
    FileMissing,
    FileRefused,
    GivenFolder,
    NotDownloaded,
    TooLarge,
    check_downloaded,
    shown,
)
from servicekit.errors import InvalidArgument

COPY_BYTES = 1 << 20
"""Files are copied through one buffer of this size, which stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class CheckpointLimits:
    """Limits of an adapter, checked before anything is allocated for it."""

    max_config_bytes: int = MAX_CONFIG_BYTES
    max_header_bytes: int = MAX_HEADER_BYTES
    max_tensors: int = 1 << 16
    max_source_bytes: int = 16 << 30
    max_rank: int = 4096
    max_match_seconds: float = 5.0
    allowed_config_keys: frozenset[str] | None = frozenset()
    """Keys of a config that may pass although this release does not know them. None: all."""


class AdapterFile:
    """A file of an adapter that is open to be read, whose errors are the store's. `name` is used in
    them; reads are positional, so threads may share it."""

    def __init__(self, folder: Path | GivenFolder, name: str) -> None:
        """Raises InvalidAdapter: FILE_MISSING, FILE_NOT_REGULAR, FILE_NOT_READABLE or
        FILE_CHANGED."""
        try:
            if isinstance(folder, Path):
                with GivenFolder(folder) as own:
                    self._file = own.open(name)
            else:
                self._file = folder.open(name)
        except FileRefused as refused:
            raise _invalid(refused, name) from refused
        self.name = name
        self.size_bytes = self._file.size_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes. Raises CorruptData if the file has become shorter."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes) from `offset`. Raises CorruptData if the file is shorter."""
        try:
            self._file.read_into(offset, buffer)
        except FileChanged as change:
            raise CorruptData(str(change), subject=self.name) from change

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Folder: TypeAlias = Path | MemoryFolder
"""Where a store keeps an adapter's files."""
AnyFolder: TypeAlias = Folder | GivenFolder
"""Where an adapter's files are: in a store, or where the user of a command has named them."""
OpenFile: TypeAlias = AdapterFile | MemoryFile


def open_file(folder: AnyFolder, name: str) -> OpenFile:
    """Opens a file of an adapter to be read. Raises as AdapterFile, and InvalidAdapter
    FILE_NOT_DOWNLOADED."""
    file = folder.get(name) if isinstance(folder, MemoryFolder) else AdapterFile(folder, name)
    if file is None:
        raise InvalidAdapter(f"{name} is missing", subject=name, reason="FILE_MISSING")
    try:
        check_downloaded(name, file.size_bytes, file.read_at)
    except BaseException as refused:
        file.close()
        if isinstance(refused, FileRefused):
            raise _invalid(refused, name) from refused
        raise
    return file


def list_names(folder: AnyFolder) -> set[str]:
    """Returns the names of all that is in a folder. Raises InvalidAdapter FILE_TOO_LARGE for too
    many in a folder that a user has named."""
    if isinstance(folder, Path):
        return set(os.listdir(folder))
    try:
        return set(folder.names)
    except FileRefused as refused:
        raise _invalid(refused, refused.name) from refused


def has_file(folder: AnyFolder, name: str) -> bool:
    """Returns whether a folder, which may be absent, has something of this name."""
    if isinstance(folder, Path):
        return os.path.lexists(folder / name)
    return folder.has(name) if isinstance(folder, GivenFolder) else name in folder.names


def read_capped(folder: AnyFolder, name: str, max_bytes: int) -> bytes:
    """Reads a small file. Raises InvalidAdapter: FILE_TOO_LARGE, and as AdapterFile."""
    advice = f": {size_advice(name)}" if is_text_file(name) else ""
    with open_file(folder, name) as file:
        if file.size_bytes > max_bytes:
            raise InvalidAdapter(
                f"{name}: {file.size_bytes} bytes is over the limit of {max_bytes}{advice}",
                subject=name,
                reason="FILE_TOO_LARGE",
            )
        return file.read_at(0, file.size_bytes)


def check_source_bytes(name: str, total_bytes: int, limits: CheckpointLimits) -> None:
    """Raises LimitExceeded if the weight files, up to this one, are over the limit together."""
    if total_bytes > limits.max_source_bytes:
        raise LimitExceeded(
            f"{name}: with it the adapter has {total_bytes} bytes, over the limit of "
            f"{limits.max_source_bytes}",
            subject=name,
            reason="SOURCE_TOO_LARGE",
        )


def parse_index(data: bytes, limits: CheckpointLimits) -> Mapping[str, str]:
    """Parses an index file; returns {tensor: file}. The caller caps `len(data)`.

    Raises InvalidAdapter: INDEX_INVALID, or as parse_object.
    """
    # Before parsing: a parsed value takes many times the memory of its bracket or comma.
    if sum(map(data.count, (b"{", b"[", b","))) > 2 * limits.max_tensors:
        raise _invalid_index(f"more than {limits.max_tensors} tensors")
    index = parse_object(data, INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not 0 < len(index) <= limits.max_tensors:
        raise _invalid_index("weight_map is not a map of tensors to files")
    for name in index.values():
        # A plain name of our own pattern: no path can lead out of the folder.
        if not isinstance(name, str) or not is_shard(name):
            raise _invalid_index(f"{show(name)} is not the name of a shard")
    if len(set(index.values())) > MAX_FILES:
        raise _invalid_index(f"more than {MAX_FILES} shards")
    return index


def check_folders(source: Path, target: Path) -> None:
    """Raises InvalidArgument unless `source` is a folder, and nothing lies at `target`."""
    if os.path.lexists(target):
        raise InvalidArgument(
            f"{shown(target)} exists: nothing is overwritten", subject=shown(target)
        )
    if not source.is_dir():
        raise InvalidArgument(
            f"{shown(source)} is no folder: give one with {CONFIG_FILE}, as PEFT saves it",
            subject=shown(source),
        )


@contextmanager
def changed_copy(source: GivenFolder, target: Path) -> Iterator[Path]:
    """Yields a folder to fill with an adapter, which becomes `target` as a whole, or not at all; it
    has the tokenizer and the chat template of `source`, with which the adapter is served. Raises as
    `copy_texts`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / target.name
        made.mkdir()
        copy_texts(source, made)
        yield made
        made.rename(target)


def copy_texts(source: GivenFolder, target: Path) -> list[str]:
    """Copies the files of a tokenizer and a chat template; returns their names. Raises
    InvalidAdapter, as AdapterFile and FILE_TOO_LARGE."""
    names = sorted(list_names(source).intersection(TEXT_FILES))
    for name in names:
        try:
            with source.open(name) as file, (target / name).open("xb") as copy:
                check_downloaded(name, file.size_bytes, file.read_at)
                check_size(name, file.size_bytes)
                for piece in file.pieces(COPY_BYTES):
                    copy.write(piece)
        except FileRefused as refused:
            raise _invalid(refused, name) from refused
    return names


def check_text_file(name: str, size_bytes: int) -> None:
    """Checks the size of a tokenizer's file or a chat template, before it is read. Raises
    InvalidAdapter FILE_TOO_LARGE."""
    try:
        check_size(name, size_bytes)
    except TooLarge as refused:
        raise _invalid(refused, name) from refused


def _invalid(refused: FileRefused, name: str) -> InvalidAdapter:
    """Returns the store's error for a file that is not read. Where the store keeps it is nobody's
    concern: it has the file's name alone."""
    message = f"{shown(name)} {refused.why}"
    match refused:
        case FileMissing():
            return InvalidAdapter(message, subject=name, reason="FILE_MISSING")
        case FileDenied():
            return InvalidAdapter(message, subject=name, reason="FILE_NOT_READABLE")
        case TooLarge():
            return InvalidAdapter(message, subject=name, reason="FILE_TOO_LARGE")
        case NotDownloaded():
            return InvalidAdapter(message, subject=name, reason="FILE_NOT_DOWNLOADED")
        case FileChanged():
            return InvalidAdapter(message, subject=name, reason="FILE_CHANGED")
        case _:
            return InvalidAdapter(message, subject=name, reason="FILE_NOT_REGULAR")


def _invalid_index(detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{INDEX_FILE}: {detail}", subject=INDEX_FILE, reason="INDEX_INVALID")


class Scratch(threading.local):
    """Each thread's bytes in flight, used again and again: to fault in new pages takes longer than
    to read into them. More than `max_bytes` are not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._data = np.empty(max_bytes, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns bytes, not initialised, that are the caller's until the thread's next call."""
        is_kept = num_bytes <= len(self._data)
        return self._data[:num_bytes] if is_kept else np.empty(num_bytes, np.uint8)
