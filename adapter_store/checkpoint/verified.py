"""Checkpoints that were just checked, handed from registration to the compiler behind it.

Every byte of a blob was hashed when it was registered; compiling it a moment later need not hash
it again, as long as its files are untouched.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

from adapter_store.checkpoint.open import Checkpoint

MAX_CHECKPOINTS = 64
TRUSTED_SECONDS = 60.0
"""What is compiled later is hashed again: a disk may have changed its mind."""

_Fingerprint = tuple[tuple[str, int, int, int], ...]


class VerifiedCheckpoints:
    """By digest, a few and for a short time. Thread-safe."""

    def __init__(self, trusted_seconds: float = TRUSTED_SECONDS) -> None:
        self._trusted_seconds = trusted_seconds
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[Checkpoint, _Fingerprint, float]] = OrderedDict()

    def put(self, checkpoint: Checkpoint) -> None:
        """A checkpoint whose bytes were all hashed, in the folder where it is kept."""
        assert checkpoint.is_verified
        fingerprint = _fingerprint(checkpoint)
        if fingerprint is None:
            return
        with self._lock:
            self._found[checkpoint.digest] = checkpoint, fingerprint, time.monotonic()
            self._found.move_to_end(checkpoint.digest)
            while len(self._found) > MAX_CHECKPOINTS:
                self._found.popitem(last=False)

    def find(self, digest: str, folder: Path) -> Checkpoint | None:
        """The checkpoint in `folder`, if nothing about its files has changed since."""
        with self._lock:
            found = self._found.get(digest)
            if found is None:
                return None
            checkpoint, fingerprint, since = found
            is_fresh = time.monotonic() - since < self._trusted_seconds
            if not is_fresh or checkpoint.folder != folder:
                del self._found[digest]
                return None
        return checkpoint if _fingerprint(checkpoint) == fingerprint else None


def _fingerprint(checkpoint: Checkpoint) -> _Fingerprint | None:
    """Of the weight files: (name, inode, size, time of change); None if one is missing."""
    names = sorted({record.file for record in checkpoint.records})
    try:
        states = [os.lstat(checkpoint.folder / name) for name in names]
    except OSError:
        return None
    return tuple(
        (name, state.st_ino, state.st_size, state.st_mtime_ns)
        for name, state in zip(names, states, strict=True)
    )
