"""The files of an adapter: which they are, and how to read them without following links."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adapter_store.checkpoint.json import parse_object, show
from adapter_store.checkpoint.memory_files import MemoryFile, MemoryFolder
from adapter_store.errors import CorruptData, InvalidAdapter, LimitExceeded
from servicekit.errors import InvalidArgument

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")
PICKLE_FILE = "adapter_model.bin"
PICKLE_FILES = (PICKLE_FILE, "adapter_model.pt", "adapter_model.pth")
MLX_WEIGHTS_FILE = "adapters.safetensors"
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
TEXT_FILES = {
    TOKENIZER_FILE: 64 << 20,
    "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 4 << 20,
    TEMPLATE_FILE: 1 << 20,
}
"""The files of a tokenizer and a chat template that are read, and the most bytes of each. The
tokenizer of 260,000 tokens has 34 MB; a configuration that lists 6,000 added tokens has 1.2."""
MAX_SHARDS = 256
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES)
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class CheckpointLimits:
    """Limits of an adapter, checked before anything is allocated for it."""

    max_config_bytes: int = 1 << 20
    max_header_bytes: int = 16 << 20
    max_tensors: int = 1 << 16
    max_source_bytes: int = 16 << 30
    max_rank: int = 4096
    max_match_seconds: float = 5.0
    allowed_config_keys: frozenset[str] | None = frozenset()
    """Keys of a config that may pass although this release does not know them. None: all."""


def is_adapter_file(name: str) -> bool:
    """Returns whether a plain file name belongs to an adapter; others are not fetched or stored."""
    return name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, MLX_WEIGHTS_FILE) or is_shard(name)


def is_text_file(name: str) -> bool:
    """Returns whether a plain file name is of a tokenizer or a chat template that is read; it is no
    part of the blob."""
    return name in TEXT_FILES


def check_text_file(name: str, size_bytes: int) -> None:
    """Checks the size of a file that `is_text_file`, before it is read. Raises InvalidAdapter
    FILE_TOO_LARGE."""
    if size_bytes > TEXT_FILES[name]:
        raise InvalidAdapter(
            f"{name}: {size_bytes} bytes or more are over the limit of {TEXT_FILES[name]}; without "
            "this file the adapter is served with its model's tokenizer and chat template",
            subject=name,
            reason="FILE_TOO_LARGE",
        )


def is_shard(name: str) -> bool:
    """Returns whether a plain file name is that of a shard, as PEFT names them."""
    return _SHARD.fullmatch(name) is not None


@contextmanager
def without_links(folder: Path) -> Iterator[Path]:
    """Yields a folder with the files of one that is the user's own, where links, as in a hub's
    cache, are followed. It is the folder itself if it has none. Of files that are no part of an
    adapter it has the names."""
    entries = list(os.scandir(folder))
    own = {each.name for each in entries if is_adapter_file(each.name) or is_text_file(each.name)}
    if not any(entry.is_symlink() and entry.name in own for entry in entries):
        yield folder
        return
    with TemporaryDirectory(prefix="loadout-") as name:
        for entry in entries:
            copy = Path(name, entry.name)
            if entry.name not in own:
                if not entry.is_dir():
                    copy.touch()
                continue
            try:
                os.link(os.path.realpath(entry), copy)
            except FileNotFoundError:
                os.symlink(os.path.realpath(entry), copy)  # which is refused by its name
            except OSError:  # on another file system
                shutil.copyfile(entry, copy)
        yield Path(name)


def check_folders(source: Path, target: Path) -> None:
    """Raises InvalidArgument unless `source` is a folder, and nothing lies at `target`."""
    if os.path.lexists(target):
        raise InvalidArgument(f"{target} exists: nothing is overwritten", subject=str(target))
    if not source.is_dir():
        raise InvalidArgument(
            f"{source} is no folder: give one with {CONFIG_FILE}, as PEFT saves it",
            subject=str(source),
        )


@contextmanager
def changed_copy(source: Path, target: Path) -> Iterator[Path]:
    """Yields a folder to fill with an adapter, which becomes `target` as a whole, or not at all; it
    has the tokenizer and the chat template of `source`, with which the adapter is served. Raises
    InvalidAdapter FILE_TOO_LARGE for these."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / target.name
        made.mkdir()
        for file in (source / name for name in TEXT_FILES):
            if file.is_file():
                check_text_file(file.name, file.stat().st_size)
                shutil.copyfile(file, made / file.name)
        yield made
        made.rename(target)


class RegularFile:
    """An open regular file of known size, not a link, pipe or device. `name` is used in errors.

    Reads are positional, so threads may share it. Nothing is mapped: a file that is truncated
    meanwhile is an error here, where a mapping would kill the process.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Raises InvalidAdapter: FILE_MISSING or FILE_NOT_REGULAR."""
        self.name = name
        try:
            self._fd = os.open(folder / name, _OPEN_FLAGS)
        except FileNotFoundError as exc:
            raise InvalidAdapter(f"{name} is missing", subject=name, reason="FILE_MISSING") from exc
        except OSError as exc:
            if exc.errno not in _NOT_REGULAR:  # of this machine, not of the adapter
                raise
            raise _not_regular(name) from exc
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise _not_regular(name)
        self.size_bytes = status.st_size

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes. Raises CorruptData if the file has become shorter."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes) from `offset`. Raises CorruptData if the file is shorter."""
        while buffer:
            count = os.preadv(self._fd, [buffer], offset)
            if count == 0:
                raise CorruptData(
                    f"{self.name} ends at byte {offset}, expected {offset + len(buffer)}",
                    subject=self.name,
                )
            offset += count
            buffer = buffer[count:]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


Folder: TypeAlias = Path | MemoryFolder
"""Where an adapter's files are."""
OpenFile: TypeAlias = RegularFile | MemoryFile


def open_file(folder: Folder, name: str) -> OpenFile:
    """Opens a file of an adapter to be read. Raises as RegularFile."""
    if isinstance(folder, Path):
        return RegularFile(folder, name)
    file = folder.get(name)
    if file is None:
        raise InvalidAdapter(f"{name} is missing", subject=name, reason="FILE_MISSING")
    return file


def list_names(folder: Folder) -> set[str]:
    """Returns the names of all that is in a folder."""
    return set(os.listdir(folder)) if isinstance(folder, Path) else folder.names


def has_file(folder: Folder, name: str) -> bool:
    """Returns whether a folder, which may be absent, has something of this name."""
    if isinstance(folder, Path):
        return os.path.lexists(folder / name)
    return folder.get(name) is not None


def read_capped(folder: Folder, name: str, max_bytes: int) -> bytes:
    """Reads a small file. Raises InvalidAdapter: FILE_TOO_LARGE, and as RegularFile."""
    with open_file(folder, name) as file:
        if file.size_bytes > max_bytes:
            raise InvalidAdapter(
                f"{name}: {file.size_bytes} bytes is over the limit of {max_bytes}",
                subject=name,
                reason="FILE_TOO_LARGE",
            )
        return file.read_at(0, file.size_bytes)


def check_source_bytes(total_bytes: int, limits: CheckpointLimits) -> None:
    """Raises LimitExceeded if the weight files together are over the limit."""
    if total_bytes > limits.max_source_bytes:
        raise LimitExceeded(
            f"the adapter's {total_bytes} bytes are over the limit of {limits.max_source_bytes}",
            subject=WEIGHTS_FILE,
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
    if len(set(index.values())) > MAX_SHARDS:
        raise _invalid_index(f"more than {MAX_SHARDS} shards")
    return index


def _not_regular(name: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"{name} is not a readable regular file", subject=name, reason="FILE_NOT_REGULAR"
    )


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
