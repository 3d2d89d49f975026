"""file:// sources: folders under allow-listed roots, read so that no path or link leads outside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapter_store.checkpoint.reading.files import COPY_BYTES
from adapter_store.errors import LimitExceeded, SourceUnavailable
from adapter_store.sources.choice import AddressOf, find_checkpoints
from adapter_store.sources.staging import Staging
from contract.folders import (
    FOLDER_FLAGS,
    FileDenied,
    Fingerprint,
    NotRegular,
    TooLarge,
    list_entries,
    open_regular,
)
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound

_REPLACED = frozenset({errno.ELOOP, errno.ESTALE})
"""Errors which show that something was replaced: by a link; while it was read, or on a file
server."""


class LocalSource:
    """Reads folders that lie, with all links resolved, under one of `roots`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(root.resolve() for root in roots)

    def fetch(self, uri: str, staging: Staging) -> str:
        """Fetches the files; a folder has no revision. See Source.fetch."""
        self.copy_folder(path_of(uri), uri, staging)
        return ""

    def copy_folder(
        self, path: Path, uri: str, staging: Staging, address_of: AddressOf | None = None
    ) -> None:
        """Copies the adapter in folder `path`; errors call it `uri`, and a folder below it by
        `address_of`. Raises as `fetch`."""
        with _translate_errors(uri):
            folder = self._resolve(path, uri)
            with self._open(folder) as fd:
                present, folders = _list(fd, uri)
            names = staging.choose_files(present, uri, folders, address_of)
            resolved = {name: self._resolve(folder / name, uri) for name in names}
            staging.check_sizes({name: os.stat(path).st_size for name, path in resolved.items()})
            seen = {name: self._copy(folder / name, uri, staging) for name in names}
            for name, fingerprint in seen.items():
                now = os.stat(folder / name)
                if Fingerprint.of(now) != fingerprint:
                    raise _changed(uri, name)

    def _copy(self, path: Path, uri: str, staging: Staging) -> Fingerprint:
        resolved = self._resolve(path, uri)
        if resolved in self._roots:
            raise NotRegular(path.name, "is a folder, not a regular file")
        with (
            self._open(resolved.parent) as fd,
            open_regular(fd, resolved.name, called=path.name) as file,
            staging.create(path.name, file.size_bytes) as staged,
        ):
            for piece in file.pieces(COPY_BYTES):
                staged.write(piece)
        return file.fingerprint

    def _resolve(self, path: Path, uri: str) -> Path:
        """Resolves all links of `path`. Raises InvalidArgument unless a root contains the
        result."""
        try:
            resolved = path.resolve()
        except RuntimeError:  # a loop of links
            resolved = None
        if resolved is None or self._root_of(resolved) is None:
            raise InvalidArgument(
                f"source_uri: {uri}: {path.name} is outside the folders that this store may "
                "read (--source-roots)",
                subject="source_uri",
                reason="SOURCE_NOT_ALLOWED",
            )
        return resolved

    def _root_of(self, resolved: Path) -> Path | None:
        return next((root for root in self._roots if resolved.is_relative_to(root)), None)

    @contextmanager
    def _open(self, folder: Path) -> Iterator[int]:
        """Opens a resolved folder component by component without following links: a link that was
        created after the path was resolved cannot lead out of the root."""
        root = self._root_of(folder)
        assert root is not None
        fd = os.open(root, FOLDER_FLAGS)
        try:
            for part in folder.relative_to(root).parts:
                inner = os.open(part, FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


def _list(fd: int, uri: str) -> tuple[list[str], list[str]]:
    """Returns the names in an open folder, and the names of checkpoints' folders, both without
    links. Raises LimitExceeded for too many."""
    try:
        entries = {entry.name: entry for entry in list_entries(fd, uri)}
    except TooLarge as refused:
        raise LimitExceeded(f"source_uri: {uri} {refused.why}", subject="source_uri") from refused
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
    except FileDenied as exc:
        raise FailedPrecondition(
            f"source_uri: {uri}: this store may not read {exc.name}",
            subject="source_uri",
            reason="SOURCE_ACCESS_DENIED",
        ) from exc
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
                f"source_uri: {uri} does not exist: its name is too long for a file",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            ) from exc
        if exc.errno in _REPLACED:
            raise _changed(uri, exc.filename) from exc
        if isinstance(exc, NotRegular):
            raise InvalidArgument(f"source_uri: {uri}: {exc}", subject=exc.name) from exc
        raise
