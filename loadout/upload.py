"""Uploads a folder as the messages of UploadAdapter: one meta, then the files in chunks.

The folder may come from somebody else; contract/folders.py limits the files that are read. The
error for a folder without an adapter lists the adapters below it, as in a trainer's run folder.
That search reads few entries and follows no links.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from contract.adapter_files import (
    CONFIG_FILE,
    MAX_FILES,
    MAX_HEADER_BYTES,
    MLX_WEIGHTS_FILE,
    MODEL_CONFIG,
    TEXT_FILES,
    WEIGHTS_FILE,
    check_size,
    checkpoint_step,
    choose_weights,
    is_plain_name,
)
from contract.folders import (
    FileRefused,
    Fingerprint,
    GivenFolder,
    NotRegular,
    RegularFile,
    TooLarge,
    changed,
    check_downloaded,
    shown,
)
from contract.side_files import find_unused
from contract.words import listed
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument

CHUNK_BYTES = 512 * 1024

MAX_WEIGHTS_BYTES = 256 << 30
"""More bytes than any file of weights has. The store's own limit is lower, but unknown here."""
_LENGTH_BYTES = 8
"""Bytes at the start of a .safetensors file that have the length of its header."""

MAX_SCANNED = 10_000
"""Most entries of folders that are read to find adapters below a folder without one."""
SCANNED_LEVELS = 2
_NUMBER = re.compile(r"([0-9]+)")

Progress = Callable[[int, int], None]
"""Called with (sent bytes, total bytes) after each chunk."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The files of the adapter in a folder, with its tokenizer and its chat template.

    Args:
        path: The folder.
        files: States of the files when the folder was opened, by name.
    """

    path: Path
    files: Mapping[str, Fingerprint]

    @property
    def total_bytes(self) -> int:
        """Returns the size of all files in bytes."""
        return sum(file.size_bytes for file in self.files.values())

    def pieces(self) -> Iterator[tuple[str, int, bytes]]:
        """Yields the files in order, in pieces. An empty file is one empty piece.

        Returns:
            Name of the file, offset in bytes, and data of each piece.

        Raises:
            FileRefused: A file cannot be read, or has changed since the folder was opened.
        """
        with GivenFolder(self.path) as folder:
            for name, fingerprint in self.files.items():
                with folder.open(name) as file:
                    if file.fingerprint != fingerprint:
                        raise changed(name)
                    offset = 0
                    for piece in file.pieces(CHUNK_BYTES):
                        yield name, offset, bytes(piece)
                        offset += len(piece)
                    if not file.size_bytes:
                        yield name, 0, b""


def is_uri(source: str | os.PathLike[str]) -> bool:
    """Returns whether a source is a URI for the store to fetch, not a local folder.

    Args:
        source: Source of an adapter, as `register` takes it.
    """
    return isinstance(source, str) and "://" in source


def open_folder(source: str | os.PathLike[str], name: str = "NAME") -> AdapterFolder:
    """Opens an adapter's folder for an upload.

    Args:
        source: Folder as PEFT or MLX-LM saves it.
        name: Adapter name for the command that an error suggests, if adapters lie below the folder.

    Returns:
        The files to upload.

    Raises:
        InvalidArgument: The folder has no adapter, files that would not be applied, or files that
            are neither regular nor links of a hub's cache. `subject` is the path.
    """
    path = Path(source)
    if not path.is_dir():
        raise _invalid(path, "is not a directory (a URI has a scheme, such as s3://bucket/prefix)")
    try:
        with GivenFolder(path) as folder:
            files = _choose(folder, name)
            return AdapterFolder(path, {each: _check_file(folder, each) for each in files})
    except FileRefused as refused:
        raise _invalid(path / refused.name, refused.why) from refused


def _choose(folder: GivenFolder, name: str) -> list[str]:
    """Returns the names of the files to send. Raises InvalidArgument, and TooLarge."""
    path = folder.path
    if not folder.has(CONFIG_FILE):
        raise _invalid(path / CONFIG_FILE, f"does not exist{_suggest(path, name)}")
    names = folder.names
    weights = choose_weights(names)
    if not weights:
        raise _invalid(path, f"has no {WEIGHTS_FILE}, and no {MLX_WEIGHTS_FILE}")
    chosen = [CONFIG_FILE, *weights]
    unused = find_unused(names.difference(chosen), is_mlx=MLX_WEIGHTS_FILE in chosen)
    if unused is not None:
        raise _invalid(
            path / unused.name,
            f"would not be applied ({unused.what}). If the adapter is complete without it, "
            "register a folder without this file",
        )
    chosen += [each for each in TEXT_FILES if each in names]
    if len(chosen) > MAX_FILES:
        raise TooLarge(
            "", f"has {len(chosen)} files of an adapter, more than the limit of {MAX_FILES}"
        )
    return chosen


def _check_file(folder: GivenFolder, name: str) -> Fingerprint:
    """Returns the state of a file that can be sent. Raises FileRefused."""
    if not is_plain_name(name):
        raise NotRegular(name, "has a name that the store does not accept: rename it, or remove it")
    with folder.open(name) as file:
        check_size(name, file.size_bytes)
        check_downloaded(name, file.size_bytes, file.read_at)
        if file.size_bytes > MAX_WEIGHTS_BYTES:
            much = f"has {file.size_bytes} bytes, more than any adapter has"
            raise TooLarge(name, f"{much}: is this the right file?")
        if name.endswith(".safetensors") and not _begins_whole(file):
            raise NotRegular(
                name,
                f"has {file.size_bytes} bytes, but does not begin like a .safetensors file of this "
                "size: is it truncated, or still being written?",
            )
        return file.fingerprint


def _begins_whole(file: RegularFile) -> bool:
    """Returns whether a .safetensors file can hold the header whose length it states."""
    if file.size_bytes < _LENGTH_BYTES:
        return False
    header_bytes = int.from_bytes(file.read_at(0, _LENGTH_BYTES), "little")
    return 0 < header_bytes <= min(MAX_HEADER_BYTES, file.size_bytes - _LENGTH_BYTES)


def find_adapters(folder: Path) -> list[Path]:
    """Finds adapters below a folder. Reads at most MAX_SCANNED entries, and follows no links to
    folders.

    Args:
        folder: Folder to search.

    Returns:
        Folders with an adapter's config, the newest checkpoint first.
    """
    found: list[Path] = []
    level, num_left = [folder], MAX_SCANNED
    for _ in range(SCANNED_LEVELS):
        others: list[Path] = []
        for each in level:
            entries = _scan(each, num_left)
            num_left -= len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.name.isprintable():
                    path = Path(entry.path)
                    (found if os.path.isfile(path / CONFIG_FILE) else others).append(path)
        level = others
    return sorted(found, key=lambda each: _newest_first(each.relative_to(folder)))


def _find_checkpoint(path: Path) -> tuple[Path, int] | None:
    """Returns the run that a path belongs to, and the step of its deepest checkpoint."""
    for number in reversed(range(len(path.parts))):
        if (step := checkpoint_step(path.parts[number])) is not None:
            return Path(*path.parts[:number]), step
    return None


def _newest_first(path: Path) -> tuple[int, list[str | int]]:
    """Returns a sort key: the highest step first, then by name, with higher numbers first."""
    checkpoint = _find_checkpoint(path)
    pieces = enumerate(_NUMBER.split(str(path)))
    name = [-int(piece) if index % 2 else piece for index, piece in pieces]
    return (1 if checkpoint is None else -checkpoint[1]), name


def _scan(folder: Path, max_entries: int) -> list[os.DirEntry[str]]:
    """Returns entries of a folder for a message; none if the folder cannot be read."""
    if max_entries == 0:
        return []
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, max_entries))
    except OSError:
        return []


def _suggest(folder: Path, name: str) -> str:
    """Returns advice for a folder without an adapter's config."""
    found = find_adapters(folder)
    if not found:
        if os.path.isfile(folder / MODEL_CONFIG):
            return ": this is a whole model; register the adapter that PEFT saves"
        return ": is this a PEFT adapter?"
    paths = [each.relative_to(folder) for each in found]
    below = listed(list(map(str, paths)), "others")
    runs = {checkpoint[0] for checkpoint in map(_find_checkpoint, paths) if checkpoint}
    which = "the latest" if len(runs) == 1 else "one"
    command = shlex.join(["loadout", "register", name, str(found[0])])
    return f", but below it are {below}; to register {which}: {command}"


def _invalid(path: Path, why: str) -> InvalidArgument:
    name = shown(path)
    return InvalidArgument(f"{name} {why}", code="INVALID_ARGUMENT", subject=name)


class Sent(Protocol):
    """The content of an upload. If the messages raise, gRPC reports a lost stream; `failure` has
    the cause."""

    repeatable: bool
    failure: Exception | None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        """Returns the messages from the beginning."""


class Upload:
    """One upload. Each `messages()` starts from the beginning, so that it can be sent again.

    If the messages raise, gRPC reports a lost stream; `failure` has the cause.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        progress: Progress | None,
        meta: store_pb.UploadMeta,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._meta = store_pb.UploadAdapterRequest(meta=meta)
        self.repeatable = not meta.if_current_digest
        self.failure: Exception | None = None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        """Yields the messages from the beginning. Raises OSError if a file cannot be read."""
        yield self._meta
        sent = 0
        try:
            for file_name, offset, data in self._folder.pieces():
                yield chunk_message(file_name, offset, data)
                sent += len(data)
                if self._progress is not None:
                    self._progress(sent, self._folder.total_bytes)
        except OSError as error:
            self.failure = error
            raise


def chunk_message(file_name: str, offset: int, data: bytes) -> store_pb.UploadAdapterRequest:
    """Returns the message of a piece of a file. It is filled in place, because a chunk made
    separately would be copied, which takes 2 ms per MiB.

    Args:
        file_name: Plain name of the file.
        offset: Where the piece starts, in bytes.
        data: The piece.
    """
    request = store_pb.UploadAdapterRequest()
    chunk = request.chunk
    chunk.file_name, chunk.offset, chunk.data = file_name, offset, data
    return request
