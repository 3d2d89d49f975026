"""Blobs: the kept source of every adapter, immutable, by digest. Here: in a store's own folder.

    blobs/<hex>/     complete and durable, or not there
    staging/<id>/    on its way in     trash/<id>/   on its way out     damaged/<id>/   set aside

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

from adapter_store.blobs.fsync import make_folder, move_folder, remove_folder
from adapter_store.core import BlobPlace, SourceFile

logger = logging.getLogger(__name__)

_STRIPES = 64


class Blobs(Protocol):
    """Blocking and thread-safe."""

    def sweep(self, known: Container[str]) -> None:
        """Removes what a crash left: only at start, before anything is staged."""

    def stage(self) -> Path:
        """A new empty folder. Its user removes it in the end, unless it became a blob."""

    def guard(self, digest: str) -> AbstractContextManager[None]:
        """Keeps others from removing the blob, between `keep` and the commit that points to it."""

    def path(self, digest: str) -> Path:
        """Where the blob's files are, if it exists."""

    def keep(
        self,
        staged: Path,
        digest: str,
        files: tuple[SourceFile, ...] = (),
        is_intact: Callable[[Path], bool] | None = None,
    ) -> BlobPlace:
        """Makes a staged folder, its files durable, the blob, or finds it kept already. One that
        is there but damaged, as `is_intact` finds, is replaced."""

    def settle(self, digest: str, kept: BlobPlace, staged: Path) -> None:
        """Called after the commit that follows `keep`, also if it was refused."""

    def leave(self, kept: BlobPlace) -> None:
        """Instead of `settle`, where nobody knows whether the commit was made."""

    def remove(self, digest: str, place: str = "") -> None:
        """It may be absent. Whoever has its files open goes on reading."""


class LocalBlobs:
    """The blobs under `data_dir`. Blocking and thread-safe; one process at a time."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "blobs"
        self._staging = data_dir / "staging"
        self._trash = data_dir / "trash"
        self._damaged = data_dir / "damaged"
        self._locks = tuple(threading.Lock() for _ in range(_STRIPES))
        for folder in (self._folder, self._staging, self._trash, self._damaged):
            make_folder(folder)

    def sweep(self, known: Container[str]) -> None:
        """Removes what a crash left, and blobs of no `known` digest: only at start, before anything
        is staged."""
        self.sweep_leftovers()
        for folder in self._folder.iterdir():
            digest = f"sha256:{folder.name}"
            if digest not in known:
                logger.info("removing a blob without a record", extra={"digest": digest})
                self.remove(digest)

    def sweep_leftovers(self) -> None:
        """Removes what was on its way in or out: only at start."""
        for folder in (self._staging, self._trash):
            for leftover in folder.iterdir():
                shutil.rmtree(leftover)

    def path(self, digest: str) -> Path:
        """Where the blob's files are, if it exists."""
        return self._folder / digest.removeprefix("sha256:")

    def stage(self) -> Path:
        """A new empty folder. Its user removes it in the end, unless it became a blob."""
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir()
        return folder

    @contextmanager
    def guard(self, digest: str) -> Iterator[None]:
        """Keeps others from removing the blob, between `keep` and the commit that points to it."""
        with self._locks[int(digest[-8:], 16) % _STRIPES]:
            yield

    def keep(
        self,
        staged: Path,
        digest: str,
        files: tuple[SourceFile, ...] = (),
        is_intact: Callable[[Path], bool] | None = None,
    ) -> BlobPlace:
        """Makes a staged folder, its files durable, the blob `digest`, or finds it kept already."""
        kept = self.path(digest)
        if is_intact is not None and kept.is_dir() and not is_intact(kept):
            logger.warning("replacing a damaged blob", extra={"digest": digest})
            self.set_aside(digest)
        move_folder(staged, kept)
        return BlobPlace()

    def settle(self, digest: str, kept: BlobPlace, staged: Path) -> None:
        """There is nothing to do: the folder's name alone makes it the blob."""

    def leave(self, kept: BlobPlace) -> None:
        """The next start sweeps what has no record."""

    def remove(self, digest: str, place: str = "") -> None:
        """It may be absent. Whoever has its files open goes on reading."""
        remove_folder(self.path(digest), self.trash())

    def trash(self) -> Path:
        """A name to move a folder to that is being removed."""
        return self._trash / uuid.uuid4().hex

    def set_aside(self, digest: str) -> None:
        """Takes a damaged blob out of the way, so that a good one can be kept. Needs its guard."""
        aside = self._damaged / f"{self.path(digest).name}-{uuid.uuid4().hex[:8]}"
        move_folder(self.path(digest), aside)
