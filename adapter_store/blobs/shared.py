"""Blobs that all replicas of a store share: objects under an S3 prefix.

    blobs/<hex>/<place>/<file>     written under a lease, then pointed to by the catalog
    fetched/<hex>-<place>/         in the data folder: copies to compile from, evicted by last use

Every upload has a place of its own, and only the place in the catalog's row is the blob. So
removing one row's objects can never remove objects that a later registration of the digest stored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar

from adapter_store.blobs.fsync import make_folder, remove_folder
from adapter_store.blobs.local import LocalBlobs
from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.blobs.volume import Volume
from adapter_store.catalog.blobs import BlobRecords
from adapter_store.checkpoint.reading.files import Folder
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.core import BlobPlace, SourceFile
from adapter_store.errors import CorruptData, SourceUnavailable, disk_full
from adapter_store.replication.lease_renewal import Leases

logger = logging.getLogger(__name__)

FOLDER = "blobs"
RECORDED = "recorded"
READ_BYTES = 1 << 20
STRIPES = 64
MEMORY_BYTES = 256 << 20
"""The memory of all copies for which a full volume has no space."""
IN_USE_SECONDS = 600
"""A copy that was used within this time may still be read, and is not evicted."""


class SharedBlobs:
    """Blocking and thread-safe. Raises SourceUnavailable while the bucket does not answer."""

    has_memory = False
    in_memory: ClassVar[list[str]] = []

    def __init__(
        self,
        local: LocalBlobs,
        bucket: Bucket,
        records: BlobRecords,
        leases: Leases,
        volume: Volume,
        capacity_bytes: int,
    ) -> None:
        self._local = local
        self._bucket = bucket
        self._records = records
        self._leases = leases
        self._volume = volume
        self._folder = volume.folder / "fetched"
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._memory_bytes: weakref.WeakKeyDictionary[MemoryFolder, int] = (
            weakref.WeakKeyDictionary()
        )
        self._copying = tuple(threading.Lock() for _ in range(STRIPES))
        self._damaged: set[str] = set()
        self._is_marked = False
        make_folder(self._folder)

    def sweep(self, known: Container[str]) -> None:
        """Removes all copies at start; they are fetched again when they are needed. Blobs that this
        store had before it shared them stay where they are."""
        for folder in self._folder.iterdir():
            remove_folder(folder, self._local.trash())

    def mark_recorded(self) -> None:
        """Notes beside the blobs that the catalog has had records. Idempotent."""
        if self._is_marked:
            return
        self._local.mark_recorded()
        try:
            self._bucket.put(RECORDED, self._local.recorded)
            self._is_marked = True
        except OSError as error:
            logger.warning("not noted that the catalog has records", extra={"why": str(error)})

    def was_recorded(self) -> bool:
        """Returns whether that was noted: a catalog without any has been lost."""
        with _translate_errors():
            return self._bucket.size(RECORDED) is not None

    def stage(self) -> Path:
        return self._local.stage()

    @contextmanager
    def guard(self, digest: str) -> Iterator[None]:
        with self._local.guard(digest):
            yield

    def path(self, digest: str) -> Folder:
        """Returns a folder with the blob's files, fetched if need be, on a full volume into memory;
        a missing path if there is no such blob. Raises CorruptData if its objects are gone or
        altered."""
        stored = self._records.find(digest)
        if stored is None:
            return self._folder / "none"
        if not stored.place:
            return self._local.path(digest)
        folder = self._copy_path(digest, stored.place)
        with self._copy_lock(digest):
            if folder.is_dir():
                os.utime(folder)
                return folder
            num_bytes = sum(file.size_bytes for file in stored.files)
            if not self._volume.has_space(num_bytes):
                self._evict(all_idle=True)
            if self._volume.has_space(num_bytes):
                self._fetch(digest, stored, folder)
                return folder
        return self._fetch_into_memory(digest, stored, num_bytes)

    def put(
        self,
        staged: Folder,
        digest: str,
        files: tuple[SourceFile, ...] = (),
        is_intact: Callable[[Path], bool] | None = None,
    ) -> BlobPlace:
        """Uploads a staged folder, unless the blob is stored already. Point the catalog to the
        returned place, then call `finish_put`."""
        assert isinstance(staged, Path)
        known = self._records.find(digest)
        if known is not None and self._is_complete(digest, known):
            return known
        place = uuid.uuid4().hex
        lease = _lease_name(digest, place)
        self._leases.acquire(lease)
        stored = BlobPlace(
            place, files, lease, self._leases.owner, None if known is None else known.place
        )
        try:
            with _translate_errors():
                for file in files:
                    self._bucket.put(f"{_prefix(digest, place)}{file.name}", staged / file.name)
        except BaseException:
            self.finish_put(digest, stored, staged)
            raise
        return stored

    def finish_put(self, digest: str, stored: BlobPlace, staged: Folder) -> None:
        """Removes the objects that the catalog does not point to: the ones just stored, or the ones
        that they replace. Objects that cannot be removed now are swept once their lease has
        ended."""
        if not stored.lease:
            return
        self._leases.forget(stored.lease)
        now = self._records.find(digest)
        try:
            if now is None or now.place != stored.place:
                self._bucket.delete_under(_prefix(digest, stored.place))
                self._leases.release(stored.lease)
                return
            if stored.replaces:
                self._bucket.delete_under(_prefix(digest, stored.replaces))
        except OSError as error:
            logger.warning("an unused blob was left to be swept", extra={"why": str(error)})
        self._damaged.discard(digest)
        # A pull may have fetched a copy since the commit.
        copy = self._copy_path(digest, stored.place)
        with self._copy_lock(digest):
            assert isinstance(staged, Path)
            is_new = staged.is_dir() and not copy.is_dir()
            if is_new:
                os.rename(staged, copy)
        if is_new:
            self._evict()

    def abandon_put(self, stored: BlobPlace) -> None:
        """Leaves the objects to be swept once their lease has ended, unless the catalog points to
        them."""
        self._leases.forget(stored.lease)

    def remove(self, digest: str, place: str = "") -> None:
        """Removes the objects of the catalog's row, now gone."""
        with self._lock:  # not while `_evict` lists the copies
            remove_folder(self._copy_path(digest, place), self._local.trash())
        if place:
            with _translate_errors():
                self._bucket.delete_under(_prefix(digest, place))

    def sweep_shared(self) -> None:
        """Removes leftovers of interrupted uploads."""
        with _translate_errors():
            for keys in self._bucket.keys(f"{FOLDER}/"):
                self._bucket.delete(self._orphans(keys))
            for uploads in self._bucket.unfinished(f"{FOLDER}/"):
                for key in self._orphans(uploads):
                    self._bucket.abort(key, uploads[key])

    def _orphans(self, keys: Iterable[str]) -> list[str]:
        places = {key: _place_of(key) for key in keys if key.count("/") == 3}
        found = self._records.orphans({place: _lease_name(*place) for place in places.values()})
        return [key for key, place in places.items() if place in found]

    def _is_complete(self, digest: str, stored: BlobPlace) -> bool:
        """Returns whether every object is there with its size, and none was found altered here."""
        if not stored.place or digest in self._damaged:
            return False
        prefix = _prefix(digest, stored.place)
        with _translate_errors():
            return all(
                self._bucket.size(prefix + file.name) == file.size_bytes for file in stored.files
            )

    def _fetch(self, digest: str, stored: BlobPlace, folder: Path) -> None:
        partial = self._local.stage()
        try:
            for file in stored.files:
                with open(partial / file.name, "wb") as target:
                    for data in self._read(digest, stored.place, file):
                        target.write(data)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._evict()

    def _fetch_into_memory(self, digest: str, stored: BlobPlace, num_bytes: int) -> MemoryFolder:
        """Returns a copy that lasts as long as it is used: the volume is full. Raises DiskFull if
        such copies would take more than MEMORY_BYTES."""
        folder = MemoryFolder(map(MemoryFile, [file.name for file in stored.files]))
        with self._lock:
            if sum(self._memory_bytes.values()) + num_bytes > MEMORY_BYTES:
                raise disk_full()
            self._memory_bytes[folder] = num_bytes
        for file in stored.files:
            target = folder.get(file.name)
            assert target is not None
            for data in self._read(digest, stored.place, file):
                target.append(bytes(data))
        return folder

    def _read(self, digest: str, place: str, file: SourceFile) -> Iterator[memoryview]:
        """Yields an object's bytes, each valid until the next. Raises CorruptData, at the end, if
        they are not the file's, SourceUnavailable if the blob has been replaced."""
        sha256 = hashlib.sha256()
        with _translate_errors():
            stream = self._bucket.open(f"{_prefix(digest, place)}{file.name}")
        if stream is not None:
            buffer = bytearray(READ_BYTES)
            with closing(stream):
                while count := self._read_some(stream.readinto, buffer):
                    sha256.update(memoryview(buffer)[:count])
                    yield memoryview(buffer)[:count]
        if stream is None or sha256.hexdigest() != file.sha256:
            if (now := self._records.find(digest)) is None or now.place != place:
                raise SourceUnavailable(f"{digest} was replaced while it was fetched; try again")
            self._damaged.add(digest)
            raise CorruptData(
                f"the stored source of {digest} is damaged; register the adapter again",
                subject=digest,
            )

    @staticmethod
    def _read_some(readinto: Callable[[memoryview], int], buffer: bytearray) -> int:
        with _translate_errors():
            return readinto(memoryview(buffer))

    def _evict(self, *, all_idle: bool = False) -> None:
        """Removes copies that exceed the capacity, or all, but for those in use."""
        capacity_bytes = 0 if all_idle else self._capacity_bytes
        with self._lock:
            found = sorted(
                (folder.stat().st_mtime, folder, _folder_bytes(folder))
                for folder in self._folder.iterdir()
            )
            excess = sum(num_bytes for _, _, num_bytes in found) - capacity_bytes
            for mtime, folder, num_bytes in found:
                if excess <= 0 or mtime > time.time() - IN_USE_SECONDS:
                    return
                remove_folder(folder, self._local.trash())
                excess -= num_bytes

    def _copy_lock(self, digest: str) -> threading.Lock:
        return self._copying[int(digest[-8:], 16) % STRIPES]

    def _copy_path(self, digest: str, place: str) -> Path:
        return self._folder / f"{digest.removeprefix('sha256:')}-{place}"


def _prefix(digest: str, place: str) -> str:
    return f"{FOLDER}/{digest.removeprefix('sha256:')}/{place}/"


def _place_of(key: str) -> tuple[str, str]:
    _, digest, place, _ = key.split("/")
    return f"sha256:{digest}", place


def _lease_name(digest: str, place: str) -> str:
    return f"blob:{digest}:{place}"


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno is not None:  # of this machine, such as a full disk
            raise
        raise SourceUnavailable(str(exc), reason="SHARED_STORE_UNAVAILABLE") from exc
