"""Blobs: the kept source of every adapter, immutable, by digest.

    blobs/<hex>/     complete and durable, or not there
    staging/<id>/    on its way in     trash/<id>/   on its way out     damaged/<id>/   set aside

A blob appears by one rename of a folder whose files are durable, before the catalog points to it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapter_store.durable import make_folder, move_folder, remove_folder

logger = logging.getLogger(__name__)

_STRIPES = 64


class Blobs:
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
        for folder in (self._staging, self._trash):
            for leftover in folder.iterdir():
                shutil.rmtree(leftover)
        for folder in self._folder.iterdir():
            digest = f"sha256:{folder.name}"
            if digest not in known:
                logger.info("removing a blob without a record", extra={"digest": digest})
                self.remove(digest)

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

    def keep(self, staged: Path, digest: str) -> None:
        """Makes a staged folder, its files durable, the blob `digest`, or finds it kept already."""
        move_folder(staged, self.path(digest))

    def remove(self, digest: str) -> None:
        """It may be absent. Whoever has its files open goes on reading."""
        remove_folder(self.path(digest), self._trash / uuid.uuid4().hex)

    def set_aside(self, digest: str) -> None:
        """Takes a damaged blob out of the way, so that a good one can be kept. Needs its guard."""
        aside = self._damaged / f"{self.path(digest).name}-{uuid.uuid4().hex[:8]}"
        move_folder(self.path(digest), aside)
