"""Reads a folder that may come from a stranger: regular files inside it, and nothing else.

A file is opened relative to the descriptor of its folder, never through a link, and without waiting
for the other end of a pipe. Its kind and size come from the descriptor that is read, because a path
may lead elsewhere a moment later. Reads end at the size that the file had when it was opened.

Hugging Face's cache has links in place of files, from `snapshots/COMMIT` of a repository into its
`blobs`. Only these links are followed, by their text and inside the same repository.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

MAX_ENTRIES = 100_000
"""Most entries of a folder."""

MAX_SHOWN_CHARS = 512

MAX_POINTER_BYTES = 1024
"""Git LFS's pointers have fewer bytes, by their specification."""
POINTER = b"version https://git-lfs.github.com/spec/v1"
"""Begins each of them."""

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GIVEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TRUSTED_FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FILE_FLAGS = _TRUSTED_FILE_FLAGS | os.O_NOFOLLOW
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV)

_SNAPSHOT = re.compile(r".*/models--[^/]+(?P<inner>/snapshots/[0-9a-f]{40}(?:/[^/]+)*)", re.DOTALL)
_BLOB = re.compile(r"blobs/([0-9a-f]{32,128})")

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class FileRefused(OSError):
    """A file or folder is not read.

    FileRefused
     ├─ FileMissing    nothing has this name
     ├─ FileDenied     this user may not read it
     ├─ NotRegular     it is a pipe, a device or a folder
     │   └─ LinkFound  it is a link
     ├─ TooLarge       it has too many bytes or entries
     ├─ NotDownloaded  Git LFS has left its pointer in place of the file
     └─ FileChanged    it has changed since it was opened

    Args:
        name: The name as it was given. The message shows it escaped if necessary.
        why: The reason, with advice.
    """

    code = errno.EINVAL

    def __init__(self, name: str, why: str) -> None:
        super().__init__(self.code, why, name)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{shown(self.name)} {self.why}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.why)


class FileMissing(FileRefused, FileNotFoundError):
    code = errno.ENOENT


class FileDenied(FileRefused, PermissionError):
    code = errno.EACCES


class NotRegular(FileRefused):
    pass


class LinkFound(NotRegular):
    code = errno.ELOOP


class TooLarge(FileRefused):
    code = errno.EFBIG


class NotDownloaded(FileRefused):
    pass


class FileChanged(FileRefused):
    code = errno.ESTALE


def shown(name: str | os.PathLike[str]) -> str:
    """Returns a name for a message: escaped if it would garble a terminal, and not too long."""
    text = os.fspath(name)
    text = text if text.isprintable() else ascii(text)
    half = MAX_SHOWN_CHARS // 2
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:half]}...{text[-half:]}"


class Fingerprint(NamedTuple):
    """The state of a file. It changes when somebody writes to the file or replaces it."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _Open:
    """Holds a descriptor until `close`, which leaving the context calls."""

    _fd: int

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RegularFile(_Open):
    """An open regular file. `fingerprint` and `size_bytes` are its state when it was opened.

    Reads are positional, so threads may share it. Nothing is mapped, because a file that is
    truncated meanwhile would then kill the process; here it raises an error.

    Args:
        fd: Open descriptor, which this object then owns.
        name: Name of the file in errors.

    Raises:
        NotRegular: It is not a regular file. The descriptor is closed.
    """

    def __init__(self, fd: int, name: str) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise _not_regular(status, name)
        self._fd = fd
        self.name = name
        self.fingerprint = Fingerprint.of(status)

    @property
    def size_bytes(self) -> int:
        return self.fingerprint.size_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        """Reads bytes.

        Args:
            offset: First byte.
            length: Number of bytes.

        Returns:
            Exactly `length` bytes.

        Raises:
            FileChanged: The file has become shorter.
        """
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer.

        Args:
            offset: First byte to read.
            buffer: Memory to fill, of bytes.

        Raises:
            FileChanged: The file has become shorter.
        """
        while buffer:
            count = os.preadv(self._fd, [buffer], offset)
            if count == 0:
                expected = offset + len(buffer)
                why = (
                    f"ends at byte {offset}, expected {expected}: it was truncated during the read"
                )
                raise FileChanged(self.name, why)
            offset += count
            buffer = buffer[count:]

    def read_all(self, max_bytes: int) -> bytes:
        """Returns the whole of a small file.

        Args:
            max_bytes: Most bytes to read.

        Raises:
            TooLarge: The file has more bytes. None is read.
            FileChanged: The file has become shorter.
        """
        if self.size_bytes > max_bytes:
            raise TooLarge(self.name, f"has {self.size_bytes} bytes, over the limit of {max_bytes}")
        return self.read_at(0, self.size_bytes)

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yields all bytes in order. Each piece is valid until the next.

        Args:
            max_bytes: Most bytes of a piece.

        Raises:
            FileChanged: The file has changed since it was opened.
        """
        buffer = memoryview(bytearray(min(max_bytes, self.size_bytes)))
        for offset in range(0, self.size_bytes, max_bytes):
            piece = buffer[: self.size_bytes - offset]
            self.read_into(offset, piece)
            yield piece
        if Fingerprint.of(os.fstat(self._fd)) != self.fingerprint:
            raise changed(self.name)


def open_regular(folder_fd: int, name: str, called: str = "") -> RegularFile:
    """Opens a file of an open folder.

    Args:
        folder_fd: Descriptor of the folder.
        name: Plain name of the file.
        called: Name of the file in errors. "": `name`.

    Returns:
        The open file.

    Raises:
        FileMissing: Nothing has this name.
        FileDenied: This user may not read the file.
        NotRegular: It is not a regular file.
        FileChanged: It was replaced meanwhile.
        OSError: A cause other than the file, such as too many open files.
    """
    called = called or name
    if "/" in name:
        raise FileMissing(called, "is a path, not the name of a file in a folder")
    with _refusals(called):
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):  # to open a device may do something
            raise _not_regular(status, called)
        return RegularFile(os.open(name, _FILE_FLAGS, dir_fd=folder_fd), called)


class GivenFolder(_Open):
    """A folder at a path that a user has named, open until `close`.

    Args:
        path: Path of the folder; it may lead through links.
        is_trusted: Follow links inside it as well, because the folder is the user's own, such as a
            base model's. Otherwise its content is treated as hostile.

    Raises:
        FileMissing: Nothing has this path.
        FileDenied: This user may not read the folder.
        NotRegular: It is not a folder.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_trusted: bool = False) -> None:
        self.path = Path(path)
        self._is_trusted = is_trusted
        with _refusals(os.fspath(path)):
            self._fd = os.open(path, _GIVEN_FOLDER_FLAGS)

    @cached_property
    def names(self) -> frozenset[str]:
        """Returns the names of all entries. Raises TooLarge if there are more than MAX_ENTRIES."""
        return frozenset(entry.name for entry in list_entries(self._fd, str(self.path)))

    def has(self, name: str) -> bool:
        """Returns whether an entry of any kind has this name."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open(self, name: str) -> RegularFile:
        """Opens a file, also through a link of a hub's cache. Raises as `open_regular` does."""
        if self._is_trusted:
            with _refusals(name):
                return RegularFile(os.open(name, _TRUSTED_FILE_FLAGS, dir_fd=self._fd), name)
        try:
            return open_regular(self._fd, name)
        except LinkFound:
            blob = self._open_blob(name)
            if blob is None:
                raise
            return blob

    def _open_blob(self, name: str) -> RegularFile | None:
        """Opens the target of link `name` in a hub's cache; returns None for any other link."""
        snapshot = _SNAPSHOT.fullmatch(os.path.realpath(self.path))
        if snapshot is None:
            return None
        to_repository = "../" * snapshot["inner"].count("/")
        target = os.readlink(name, dir_fd=self._fd)
        blob = _BLOB.fullmatch(target.removeprefix(to_repository))
        if blob is None or not target.startswith(to_repository):
            return None
        try:
            blobs = os.open(f"{to_repository}blobs", FOLDER_FLAGS, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError):  # no folder, but maybe a link to one
            return None
        try:
            return open_regular(blobs, blob[1], called=name)
        except FileMissing:
            why = f"is a link into Hugging Face's cache, which lacks {target}: download it again"
            raise FileMissing(name, why) from None
        finally:
            os.close(blobs)


def list_entries(folder_fd: int, name: str) -> list[os.DirEntry[str]]:
    """Returns the entries of an open folder.

    Args:
        folder_fd: Descriptor of the folder.
        name: Name of the folder in errors.

    Raises:
        TooLarge: The folder has more than MAX_ENTRIES entries.
    """
    with os.scandir(folder_fd) as listing:
        entries = list(islice(listing, MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        advice = "put the adapter's files into a folder of their own"
        raise TooLarge(name, f"has more than {MAX_ENTRIES} entries: {advice}")
    return entries


def changed(name: str) -> FileChanged:
    return FileChanged(name, "changed while it was read: try again once nobody writes to it")


def check_downloaded(name: str, size_bytes: int, read_at: Callable[[int, int], bytes]) -> None:
    """Checks that a file is not Git LFS's pointer to it, as after a clone without `git lfs`.

    Args:
        name: Name of the file in errors.
        size_bytes: Its size.
        read_at: Returns bytes of the file, by offset and length. Called for small files only.

    Raises:
        NotDownloaded: It is a pointer.
    """
    if len(POINTER) <= size_bytes < MAX_POINTER_BYTES and read_at(0, len(POINTER)) == POINTER:
        raise NotDownloaded(
            name,
            "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository",
        )


def _not_regular(status: os.stat_result, name: str) -> NotRegular:
    if stat.S_ISLNK(status.st_mode):
        return LinkFound(name, "is a link, which is not followed: put a copy of the file there")
    kind = next((words for is_kind, words in _KINDS if is_kind(status.st_mode)), "something else")
    return NotRegular(name, f"is {kind}, not a regular file: remove it, or put a file there")


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turns the system's errors about a file into FileRefused with this name. Errors with another
    cause stay as they are."""
    try:
        yield
    except FileRefused:
        raise
    except FileNotFoundError as error:
        raise FileMissing(name, "is missing") from error
    except PermissionError as error:
        raise FileDenied(name, "may not be read by this user: permission denied") from error
    except NotADirectoryError as error:
        raise NotRegular(name, "is not a folder") from error
    except OSError as error:
        if error.errno in _NOT_REGULAR:  # since it was looked at
            raise changed(name) from error
        raise
