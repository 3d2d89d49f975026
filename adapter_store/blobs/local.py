"""Blobs: the source files of every adapter, immutable, by digest; here, in the store's own folder.

    blobs/<hex>/     complete and durable, or absent
    recorded         there once the catalog has had a record
    staging/<id>/    being written     trash/<id>/   being removed     damaged/<id>/   quarantined

Blobs of ephemeral registrations are in memory alone, and gone with the process.

A blob appears by one rename of a folder whose files are durable, before the catalog points to it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from adapter_store.blobs.fsync import make_folder, move_folder, remove_folder, write_atomically
from adapter_store.checkpoint.reading.files import Folder
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.core import MEMORY, BlobPlace, SourceFile

logger = logging.getLogger(__name__)

_STRIPES = 64


class Blobs(Protocol):
    """Blocking and thread-safe."""

    has_memory: bool
    """Whether it stores files that lie in memory: where this process alone is asked for it."""

    @property
    def in_memory(self) -> list[str]:
        """The digests of the blobs in memory."""

    def sweep(self, known: Container[str]) -> None:
        """Removes blobs of no `known` digest, which a crash left, and copies of others. Call it at
        start only, before anything is staged."""

    def mark_recorded(self) -> None:
        """Notes beside the blobs that the catalog has had records. Idempotent."""

    def was_recorded(self) -> bool:
        """Returns whether that was noted: a catalog without any has been lost."""

    def stage(self) -> Path:
        """Creates an empty folder. The caller removes it in the end, unless it became a blob."""

    def guard(self, digest: str) -> AbstractContextManager[None]:
        """Prevents the removal of the blob between `put` and the commit that points to it."""

    def path(self, digest: str) -> Folder:
        """Returns the folder of the blob's files, if it exists."""

    def put(
        self,
        staged: Folder,
        digest: str,
        files: tuple[SourceFile, ...] = (),
        is_intact: Callable[[Path], bool] | None = None,
    ) -> BlobPlace:
        """Stores a staged folder, whose files are durable or in memory, as the blob, unless it is
        stored already. An existing blob that `is_intact` rejects is replaced."""

    def finish_put(self, digest: str, stored: BlobPlace, staged: Folder) -> None:
        """Cleans up after the commit that follows `put`, also if it was refused."""

    def abandon_put(self, stored: BlobPlace) -> None:
        """Cleans up instead of `finish_put` when it is not known whether the commit was made."""

    def remove(self, digest: str, place: str = "") -> None:
        """Removes the blob, which may be absent. Open files stay readable."""


class LocalBlobs:
    """The blobs under `data_dir`, and those in memory. Blocking and thread-safe; one process at a
    time."""

    has_memory = True

    def __init__(self, data_dir: Path) -> None:
        self._in_memory: dict[str, MemoryFolder] = {}
        self._folder = data_dir / "blobs"
        self._staging = data_dir / "staging"
        self._trash = data_dir / "trash"
        self._damaged = data_dir / "damaged"
        self.recorded = data_dir / "recorded"
        self._locks = tuple(threading.Lock() for _ in range(_STRIPES))
        for folder in (self._folder, self._staging, self._trash, self._damaged):
            make_folder(folder)

    def sweep(self, known: Container[str]) -> None:
        """Removes blobs of no `known` digest. Call it at start only, before anything is staged."""
        for folder in self._folder.iterdir():
            digest = f"sha256:{folder.name}"
            if digest not in known:
                logger.info("removing a blob without a record", extra={"digest": digest})
                self.remove(digest)

    def mark_recorded(self) -> None:
        """Notes beside the blobs that the catalog has had records, durably. Idempotent."""
        if not self.recorded.exists():
            write_atomically(self.recorded, b"")

    def was_recorded(self) -> bool:
        """Returns whether that was noted: a catalog without any has been lost."""
        return self.recorded.exists()

    def sweep_leftovers(self) -> None:
        """Removes unfinished writes and removals. Call it at start only."""
        for folder in (self._staging, self._trash):
            for leftover in folder.iterdir():
                shutil.rmtree(leftover)

    def path(self, digest: str) -> Folder:
        """Returns the folder of the blob's files, if it exists: on disk, or else in memory."""
        folder = self._path(digest)
        if folder.is_dir():
            return folder
        return self._in_memory.get(digest, folder)

    def _path(self, digest: str) -> Path:
        return self._folder / digest.removeprefix("sha256:")

    @property
    def in_memory(self) -> list[str]:
        """The digests of the blobs in memory."""
        return list(self._in_memory)

    def stage(self) -> Path:
        """Creates an empty folder. The caller removes it in the end, unless it became a blob."""
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir()
        return folder

    @contextmanager
    def guard(self, digest: str) -> Iterator[None]:
        """Prevents the removal of the blob between `put` and the commit that points to it."""
        with self._locks[int(digest[-8:], 16) % _STRIPES]:
            yield

    def put(
        self,
        staged: Folder,
        digest: str,
        files: tuple[SourceFile, ...] = (),
        is_intact: Callable[[Path], bool] | None = None,
    ) -> BlobPlace:
        """See Blobs.put. A blob in memory stays there, unless the blob is on disk."""
        folder = self._path(digest)
        if isinstance(staged, MemoryFolder):
            if folder.is_dir():
                return BlobPlace()
            if digest not in self._in_memory:
                staged.is_kept = True
                self._in_memory[digest] = staged
            return BlobPlace(MEMORY, files)
        if is_intact is not None and folder.is_dir() and not is_intact(folder):
            logger.warning("replacing a damaged blob", extra={"digest": digest})
            self.quarantine(digest)
        move_folder(staged, folder)
        return BlobPlace()

    def finish_put(self, digest: str, stored: BlobPlace, staged: Folder) -> None:
        """Lets go of the blob in memory where it is on disk now, whose name alone makes it the
        blob."""
        if stored.place != MEMORY:
            self._forget(digest)

    def abandon_put(self, stored: BlobPlace) -> None:
        """Does nothing: the next start sweeps blobs without a record, the collector those in
        memory."""

    def remove(self, digest: str, place: str = "") -> None:
        """Removes the blob, which may be absent. Open files stay readable."""
        self._forget(digest)
        remove_folder(self._path(digest), self.trash())

    def _forget(self, digest: str) -> None:
        folder = self._in_memory.pop(digest, None)
        if folder is not None:
            folder.release()

    def trash(self) -> Path:
        """Returns a path to move a folder to before it is removed."""
        return self._trash / uuid.uuid4().hex

    def quarantine(self, digest: str) -> None:
        """Moves a damaged blob away, so that an intact one can be stored. Needs its guard."""
        folder = self._path(digest)
        move_folder(folder, self._damaged / f"{folder.name}-{uuid.uuid4().hex[:8]}")
