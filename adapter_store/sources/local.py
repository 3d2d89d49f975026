"""file:// sources: folders under allow-listed roots, read so that no path or link leads outside."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from adapter_store.errors import LimitExceeded, SourceUnavailable
from adapter_store.sources.staging import Staging, find_checkpoints
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACED = frozenset({errno.ELOOP, errno.ESTALE})  # by a link; on a file server

MAX_ENTRIES = 100_000
"""How many entries a folder may have."""

COPY_BYTES = 1 << 20
"""Files pass through one buffer of this size, which stays in a processor's cache."""


class Fingerprint(NamedTuple):
    """The state of a file, which changes when the file is written to or replaced."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class LocalSource:
    """Reads folders that lie, with all links resolved, under one of `roots`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(root.resolve() for root in roots)

    def fetch(self, uri: str, staging: Staging) -> str:
        """Fetches the files; a folder has no revision. See Source.fetch."""
        self.copy_folder(path_of(uri), uri, staging)
        return ""

    def copy_folder(self, path: Path, uri: str, staging: Staging, advice: str = "") -> None:
        """Copies the adapter in folder `path`; errors call it `uri`, and if only folders below it
        are adapters, give `advice`. Raises as `fetch`."""
        with _translate_errors(uri):
            folder = self._resolve(path, uri)
            with self._open(folder, uri, _FOLDER_FLAGS) as fd:
                present, folders = _list(fd, uri)
            names = staging.choose_files(present, uri, folders, advice)
            resolved = {name: self._resolve(folder / name, uri) for name in names}
            staging.check_sizes({name: os.stat(path).st_size for name, path in resolved.items()})
            seen = {name: self._copy(folder / name, uri, staging) for name in names}
            for name, fingerprint in seen.items():
                now = os.stat(folder / name)
                if Fingerprint.of(now) != fingerprint:
                    raise _changed(uri, name)

    def _copy(self, path: Path, uri: str, staging: Staging) -> Fingerprint:
        resolved = self._resolve(path, uri)
        with self._open(resolved, uri, _FILE_FLAGS) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(
                    f"source_uri: {uri}: {path.name} is not a regular file", subject=path.name
                )
            fingerprint = Fingerprint.of(status)
            with staging.create(path.name, fingerprint.size_bytes) as file:
                step = memoryview(bytearray(min(COPY_BYTES, fingerprint.size_bytes + 1)))
                while num_bytes := os.readv(fd, [step]):
                    file.write(step[:num_bytes])
                if (
                    Fingerprint.of(os.fstat(fd)) != fingerprint
                    or file.size_bytes != fingerprint.size_bytes
                ):
                    raise _changed(uri, path.name)
        return fingerprint

    def _resolve(self, path: Path, uri: str) -> Path:
        """Resolves all links of `path`. Raises InvalidArgument unless a root contains the
        result."""
        try:
            resolved = path.resolve()
        except RuntimeError:  # a loop of links
            resolved = None
        if resolved is None or self._root_of(resolved) is None:
            raise InvalidArgument(
                f"source_uri: {uri}: {path.name} does not lie in one of the folders that this "
                "store may read (--source-roots)",
                subject="source_uri",
                reason="SOURCE_NOT_ALLOWED",
            )
        return resolved

    def _root_of(self, resolved: Path) -> Path | None:
        return next((root for root in self._roots if resolved.is_relative_to(root)), None)

    @contextmanager
    def _open(self, resolved: Path, uri: str, flags: int) -> Iterator[int]:
        """Opens a resolved path component by component without following links: one that was
        created after the path was resolved cannot lead out of the root."""
        root = self._root_of(resolved)
        assert root is not None
        parts = resolved.relative_to(root).parts
        fd = os.open(root, _FOLDER_FLAGS)
        try:
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                inner = os.open(part, flags if last else _FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


def _list(fd: int, uri: str) -> tuple[list[str], list[str]]:
    """Returns the names in an open folder, and those of checkpoints' folders, links not among them.
    Raises LimitExceeded for more than MAX_ENTRIES."""
    with os.scandir(fd) as listing:
        entries = {entry.name: entry for entry in islice(listing, MAX_ENTRIES + 1)}
        if len(entries) > MAX_ENTRIES:
            raise LimitExceeded(
                f"source_uri: {uri} has more than {MAX_ENTRIES} entries", subject="source_uri"
            )
        checkpoints = find_checkpoints(entries)
        folders = [name for name in checkpoints if entries[name].is_dir(follow_symlinks=False)]
    return list(entries), folders


def path_of(uri: str) -> Path:
    """Returns the absolute path of a file:// URI. Raises InvalidArgument."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # brackets that hold no address
        parts = urlsplit("")
    path = unquote(parts.path)
    if (
        parts.scheme != "file"
        or parts.netloc not in ("", "localhost")
        or parts.query
        or parts.fragment
        or not path.startswith("/")
        or "\0" in path
    ):
        raise InvalidArgument(
            f"source_uri: {uri} is not of the form file:///absolute/path", subject="source_uri"
        )
    return Path(path)


def _changed(uri: str, name: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"source_uri: {uri}: {name} changed while it was read",
        subject=name,
        reason="SOURCE_CHANGED",
    )


@contextmanager
def _translate_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as exc:
        raise NotFound(
            f"source_uri: {uri} does not exist", subject="source_uri", reason="SOURCE_NOT_FOUND"
        ) from exc
    except NotADirectoryError as exc:
        raise InvalidArgument(f"source_uri: {uri} is not a folder", subject="source_uri") from exc
    except PermissionError as exc:
        raise FailedPrecondition(
            f"source_uri: this store may not read {uri}",
            subject="source_uri",
            reason="SOURCE_ACCESS_DENIED",
        ) from exc
    except OSError as exc:
        if exc.errno == errno.ENAMETOOLONG:
            raise NotFound(
                f"source_uri: {uri} does not exist, no file has so long a name",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            ) from exc
        if exc.errno == errno.ENXIO:  # a socket
            raise InvalidArgument(
                f"source_uri: {uri}: {exc.filename} is not a regular file", subject=exc.filename
            ) from exc
        if exc.errno in _REPLACED:
            raise _changed(uri, exc.filename) from exc
        raise
