"""Checkpoints that were just checked, passed on from registration to compilation.

Every byte of a blob is hashed when it is registered; compiling it a moment later need not hash it
again, as long as its files are unchanged.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.files import Folder
from adapter_store.checkpoint.reading.memory_files import MemoryFolder

MAX_CHECKPOINTS = 64
TRUSTED_SECONDS = 60.0
"""After this time a checkpoint is hashed again: the disk may have failed."""

_Fingerprint = tuple[tuple[str, int, int, int], ...]
_Place = Path | weakref.ref[MemoryFolder]


class VerifiedCheckpoints:
    """Holds a few checkpoints by digest, for a short time, but no memory of their files.
    Thread-safe."""

    def __init__(self, trusted_seconds: float = TRUSTED_SECONDS) -> None:
        self._trusted_seconds = trusted_seconds
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[Checkpoint, _Place, _Fingerprint, float]] = (
            OrderedDict()
        )

    def put(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint whose bytes were all hashed, in the folder of its blob."""
        assert checkpoint.is_verified
        fingerprint = _fingerprint(checkpoint)
        if fingerprint is None:
            return
        place = _place(checkpoint.stored_folder)
        held = checkpoint if isinstance(place, Path) else replace(checkpoint, folder=Path())
        with self._lock:
            self._found[checkpoint.digest] = held, place, fingerprint, time.monotonic()
            self._found.move_to_end(checkpoint.digest)
            while len(self._found) > MAX_CHECKPOINTS:
                self._found.popitem(last=False)

    def find(self, digest: str, folder: Folder) -> Checkpoint | None:
        """Returns the checkpoint in `folder`, if its files have not changed since."""
        with self._lock:
            found = self._found.get(digest)
            if found is None:
                return None
            held, place, fingerprint, since = found
            is_fresh = time.monotonic() - since < self._trusted_seconds
            if not is_fresh or place != _place(folder):
                del self._found[digest]
                return None
        checkpoint = held if isinstance(folder, Path) else replace(held, folder=folder)
        return checkpoint if _fingerprint(checkpoint) == fingerprint else None


def _place(folder: Folder) -> _Place:
    """Returns the key of a checkpoint's place, and keeps nothing in memory."""
    return folder if isinstance(folder, Path) else weakref.ref(folder)


def _fingerprint(checkpoint: Checkpoint) -> _Fingerprint | None:
    """Returns (name, inode, size, time of change) of the weight files; None if one is missing.
    Files in memory cannot change."""
    folder = checkpoint.stored_folder
    if not isinstance(folder, Path):
        return ()
    names = sorted({record.file for record in checkpoint.records})
    try:
        states = [os.lstat(folder / name) for name in names]
    except OSError:
        return None
    return tuple(
        (name, state.st_ino, state.st_size, state.st_mtime_ns)
        for name, state in zip(names, states, strict=True)
    )
