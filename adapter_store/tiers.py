"""Where compiled images lie: memory and disk, each least recently used first out, by bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store.catalog import ImageKey
from adapter_store.durable import make_folder
from adapter_store.image import Image
from adapter_store.image_file import remove_image, sha256_path


@dataclass(slots=True)
class TierCounts:
    """Bytes and images now; hits, misses and evictions since start."""

    capacity_bytes: int
    used_bytes: int = 0
    images: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(eq=False, slots=True)
class MemoryEntry:
    """An image in memory. `holds` counts the streams that read it: as long, it takes its bytes."""

    key: ImageKey
    image: Image
    holds: int = 0
    is_cached: bool = field(default=False)

    @property
    def num_bytes(self) -> int:
        return self.image.plan.total_bytes


class MemoryTier:
    """Used from one thread. Held and pinned images never leave; they alone may exceed capacity."""

    def __init__(self, capacity_bytes: int, is_pinned: Callable[[ImageKey], bool]) -> None:
        self.counts = TierCounts(capacity_bytes)
        self._is_pinned = is_pinned
        self._entries: OrderedDict[ImageKey, MemoryEntry] = OrderedDict()

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._entries

    def find(self, key: ImageKey) -> MemoryEntry | None:
        """The image, now the most recently used; counts a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._entries.move_to_end(key)
        return entry

    def has_room(self, num_bytes: int) -> bool:
        return self.counts.used_bytes + num_bytes <= self.counts.capacity_bytes

    def put(self, entry: MemoryEntry) -> None:
        """Keeps an image, letting others go for it; itself, too, once nobody holds it, if it is
        larger than what can be freed."""
        self.drop(entry.key)
        self._entries[entry.key] = entry
        entry.is_cached = True
        self._account(entry, entry.holds == 0)
        self.shrink(keep=entry)

    @contextmanager
    def hold(self, entry: MemoryEntry) -> Iterator[MemoryEntry]:
        """Keeps the image's bytes while the context lasts, whatever happens to the tier."""
        entry.holds += 1
        self._account(entry, entry.holds == 1 and not entry.is_cached)
        try:
            yield entry
        finally:
            entry.holds -= 1
            if entry.holds == 0 and not entry.is_cached:
                self._release(entry)
            self.shrink()

    def drop(self, key: ImageKey) -> None:
        """Forgets an image; its bytes are free when nobody holds it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.is_cached = False
            if entry.holds == 0:
                self._release(entry)

    def drop_digest(self, digest: str) -> None:
        for key in [key for key in self._entries if key[0] == digest]:
            self.drop(key)

    def shrink(self, keep: MemoryEntry | None = None) -> None:
        """Lets the least recently used go until capacity is met, but not `keep`."""
        if self.counts.used_bytes <= self.counts.capacity_bytes:
            return
        for key, entry in list(self._entries.items()):
            if entry.holds == 0 and entry is not keep and not self._is_pinned(key):
                self.drop(key)
                self.counts.evictions += 1
                if self.counts.used_bytes <= self.counts.capacity_bytes:
                    return

    def check_integrity(self) -> None:
        """Asserts that the accounts equal what is there; call it while nothing is held."""
        assert self.counts.images == len(self._entries)
        assert self.counts.used_bytes == sum(e.num_bytes for e in self._entries.values())
        assert all(e.is_cached and e.holds == 0 for e in self._entries.values())

    def _account(self, entry: MemoryEntry, is_new: bool) -> None:
        if is_new:
            self.counts.used_bytes += entry.num_bytes
            self.counts.images += 1

    def _release(self, entry: MemoryEntry) -> None:
        self.counts.used_bytes -= entry.num_bytes
        self.counts.images -= 1


class DiskTier:
    """images/<layout>/<digest>.safetensors with its .sha256. Thread-safe; survives restarts."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.counts = TierCounts(capacity_bytes)
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: OrderedDict[ImageKey, int] = OrderedDict()
        make_folder(folder)
        self._scan()

    def path(self, key: ImageKey) -> Path:
        digest, layout_id = (part.removeprefix("sha256:") for part in key)
        return self._folder / layout_id / f"{digest}.safetensors"

    def find(self, key: ImageKey) -> Path | None:
        """The file, now the most recently used. It may be gone, or damaged, when it is read."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        path = self.path(key)
        try:
            os.utime(path)  # the order of use, for the next start
        except FileNotFoundError:
            return None
        return path

    def count(self, was_hit: bool) -> None:
        """Counts a hit or a miss: only once read is it known whether a file was good."""
        with self._lock:
            self.counts.hits += was_hit
            self.counts.misses += not was_hit

    def has_room(self, num_bytes: int) -> bool:
        with self._lock:
            return self.counts.used_bytes + num_bytes <= self.counts.capacity_bytes

    def prepare(self, key: ImageKey, num_bytes: int) -> Path | None:
        """Frees room for an image about to be written; None if it is larger than the tier."""
        if num_bytes > self.counts.capacity_bytes:
            return None
        self._make_room(num_bytes)
        path = self.path(key)
        make_folder(path.parent)
        return path

    def add(self, key: ImageKey) -> None:
        """Accounts for a file that is there; one larger than the tier is removed."""
        path = self.path(key)
        sidecar = sha256_path(path)
        size = path.stat().st_size + (sidecar.stat().st_size if sidecar.exists() else 0)
        self._make_room(size)
        if size > self.counts.capacity_bytes:
            remove_image(path)
            return
        with self._lock:
            self._forget(key)
            self._sizes[key] = size
            self.counts.used_bytes += size
            self.counts.images += 1

    def remove(self, key: ImageKey) -> None:
        with self._lock:
            self._forget(key)
        remove_image(self.path(key))

    def clear(self) -> None:
        for key in self.cached():
            self.remove(key)

    def cached(self) -> list[ImageKey]:
        """Least recently used first."""
        with self._lock:
            return list(self._sizes)

    def _forget(self, key: ImageKey) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.counts.used_bytes -= size
            self.counts.images -= 1

    def _make_room(self, num_bytes: int) -> None:
        leaving = []
        with self._lock:
            while self._sizes and self.counts.used_bytes + num_bytes > self.counts.capacity_bytes:
                oldest = next(iter(self._sizes))
                leaving.append(oldest)
                self._forget(oldest)
                self.counts.evictions += 1
        for key in leaving:
            remove_image(self.path(key))

    def _scan(self) -> None:
        """Finds what an earlier process left, oldest use first; removes its half-written files."""
        found: list[tuple[int, ImageKey]] = []
        images = set(self._folder.glob("*/[!.]*.safetensors"))
        for path in set(self._folder.glob("*/*")) - images - set(map(sha256_path, images)):
            path.unlink()
        for path in images:
            key = (f"sha256:{path.stem}", f"sha256:{path.parent.name}")
            found.append((path.stat().st_mtime_ns, key))
        for _, key in sorted(found):
            self.add(key)
