"""The disk tier of compiled images, within a number of bytes, evicted by least recent use."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store.blobs.fsync import make_folder
from adapter_store.core import ImageKey
from adapter_store.images.tiers.file import remove_image, sha256_path


class Removal(enum.Enum):
    """Why an image was removed from a tier other than by eviction: its adapter is deleted, its
    layout is unused, or it is damaged."""

    DELETED = "deleted"
    UNUSED = "unused"
    DAMAGED = "damaged"


@dataclass(slots=True)
class TierCounts:
    """Current bytes and images; hits, misses, evictions and other removals since start."""

    capacity_bytes: int
    used_bytes: int = 0
    images: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    removals: dict[Removal, int] = field(default_factory=lambda: dict.fromkeys(Removal, 0))


VERIFIED_SECONDS = 600.0
"""How long after every byte of a file was checked it is read without hashing, if it is unchanged;
pulling services check each part in any case."""

_FileState = tuple[int, int, int]


class DiskTier:
    """images/<layout>/<digest>.safetensors with its .sha256. Thread-safe; survives restarts.

    The order of use is kept in the files' atime; the mtime shows whether a file was changed.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.counts = TierCounts(capacity_bytes)
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: OrderedDict[ImageKey, int] = OrderedDict()
        self._verified: dict[ImageKey, tuple[_FileState, float]] = {}
        make_folder(folder)
        self._scan()

    def path(self, key: ImageKey) -> Path:
        digest, layout_id = (part.removeprefix("sha256:") for part in key)
        return self._folder / layout_id / f"{digest}.safetensors"

    def find(self, key: ImageKey) -> Path | None:
        """Returns the file, which becomes the most recently used. It may be gone, or damaged, when
        it is read."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        path = self.path(key)
        try:
            # The order of use, for the next start.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return None
        return path

    def is_verified(self, key: ImageKey, fd: int) -> bool:
        """Returns whether the open file is unchanged since a recent `set_verified`."""
        with self._lock:
            state, since = self._verified.get(key, (None, 0.0))
        return state == _state(fd) and time.monotonic() - since < VERIFIED_SECONDS

    def set_verified(self, key: ImageKey, fd: int) -> None:
        """Records that every byte of the open file was just checked."""
        state = _state(fd)
        with self._lock:
            if key in self._sizes:
                self._verified[key] = state, time.monotonic()

    def count(self, was_hit: bool) -> None:
        """Counts a hit or a miss, once it is known whether the file was intact."""
        with self._lock:
            self.counts.hits += was_hit
            self.counts.misses += not was_hit

    def evict(self, num_bytes: int) -> None:
        """Evicts the least recently used images, of so many bytes together."""
        self._evict_to(max(0, self.counts.used_bytes - num_bytes))

    def has_space(self, num_bytes: int) -> bool:
        with self._lock:
            return self.counts.used_bytes + num_bytes <= self.counts.capacity_bytes

    def prepare(self, key: ImageKey, num_bytes: int) -> Path | None:
        """Evicts enough to write an image; returns its path, or None if it is larger than the
        tier."""
        if num_bytes > self.counts.capacity_bytes:
            return None
        self._evict_to(self.counts.capacity_bytes - num_bytes)
        path = self.path(key)
        make_folder(path.parent)
        return path

    def add(self, key: ImageKey) -> None:
        """Accounts for a written file. One larger than the tier is removed."""
        path = self.path(key)
        sidecar = sha256_path(path)
        size = path.stat().st_size + (sidecar.stat().st_size if sidecar.exists() else 0)
        self._evict_to(self.counts.capacity_bytes - size)
        if size > self.counts.capacity_bytes:
            remove_image(path)
            return
        with self._lock:
            self._forget(key)
            self._sizes[key] = size
            self.counts.used_bytes += size
            self.counts.images += 1

    def remove(self, key: ImageKey, reason: Removal) -> None:
        with self._lock:
            self.counts.removals[reason] += self._forget(key)
        remove_image(self.path(key))

    def clear(self) -> None:
        """Removes all images."""
        for key in self.cached():
            self.remove(key, Removal.UNUSED)

    def cached(self) -> list[ImageKey]:
        """Returns the keys of all images, least recently used first."""
        with self._lock:
            return list(self._sizes)

    def _forget(self, key: ImageKey) -> bool:
        """Drops the image from the accounts. Returns whether it was there."""
        self._verified.pop(key, None)
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.counts.used_bytes -= size
        self.counts.images -= 1
        return True

    def _evict_to(self, num_bytes: int) -> None:
        """Evicts the least recently used images until so many bytes are used."""
        evicted = []
        with self._lock:
            while self._sizes and self.counts.used_bytes > num_bytes:
                oldest = next(iter(self._sizes))
                evicted.append(oldest)
                self._forget(oldest)
                self.counts.evictions += 1
        for key in evicted:
            remove_image(self.path(key))

    def _scan(self) -> None:
        """Adds the images of an earlier process, oldest use first, and removes its partial files:
        an image is complete once its `.sha256` is there."""
        found: list[tuple[int, ImageKey]] = []
        images = {
            path for path in self._folder.glob("*/[!.]*.safetensors") if sha256_path(path).exists()
        }
        for path in set(self._folder.glob("*/*")) - images - set(map(sha256_path, images)):
            path.unlink()
        for path in images:
            key = ImageKey(f"sha256:{path.stem}", f"sha256:{path.parent.name}")
            found.append((path.stat().st_atime_ns, key))
        for _, key in sorted(found):
            self.add(key)


def _state(fd: int) -> _FileState:
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns
