"""Compiled images that all replicas of a store share, so that of them one compiles.

    compiled/<compiler>/<layout>/<digest>.safetensors     as in the disk tier; written once

An object appears whole or not at all, and never changes: it is written only if it is absent. Who
may compile is a lease in the catalog; a replica that dies while compiling is taken over from when
its lease ends. A cache: whatever fails here is an OSError, and images are compiled without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from adapter_store.blobs.s3_prefix import MAX_PUT_BYTES, Bucket, ObjectStream
from adapter_store.core import ImageKey
from adapter_store.errors import CatalogUnavailable
from adapter_store.images.disk_tier import TierCounts
from adapter_store.images.file import ImageStream
from adapter_store.images.plan import COMPILER_REVISION, ImagePlan
from adapter_store.replication.leases import Leases

logger = logging.getLogger(__name__)

FOLDER = "compiled"
POLL_SECONDS = 0.1
WAIT_SECONDS = 1.0


class Claim(Protocol):
    """The right to compile one image, as long as no other replica may."""

    def release(self) -> None:
        """Lets others in; what was published before is there for them to find."""


class SharedImages(Protocol):
    """The tier of images that all replicas of a store share. Blocking and thread-safe.

    It is a cache: when it does not answer (OSError), images are compiled here.
    """

    def find(self, key: ImageKey, plan: ImagePlan) -> ImageStream | None:
        """Opens the shared image, if there is one. Its reader verifies it, and closes it."""

    def claim(self, key: ImageKey, *, wait: bool) -> Claim | None:
        """The right to compile the image here. None: look again with `find`, another replica
        had it, and may still be at work. With `wait` that is only after a moment's waiting."""

    def publish(self, key: ImageKey, path: Path) -> None:
        """Copies a whole image file there. One that is there already stays."""

    def remove(self, key: ImageKey) -> None:
        """Takes away an image that is damaged; it may be absent."""


class LeaseClaim:
    """The right to compile one image."""

    def __init__(self, leases: Leases, key: str) -> None:
        self._leases = leases
        self._key = key

    def release(self) -> None:
        """Lets others in; what was published before is there for them to find."""
        self._leases.release(self._key)


class SharedTier:
    """Blocking and thread-safe. Images of another compiler are not seen."""

    def __init__(self, bucket: Bucket, leases: Leases) -> None:
        self._bucket = bucket
        self._leases = leases
        self.counts = TierCounts(capacity_bytes=0)

    def find(self, key: ImageKey, plan: ImagePlan) -> ObjectStream | None:
        """Opens the shared image, if there is one. Its reader verifies it, and closes it."""
        stream = self._bucket.open(self._object(key))
        self.counts.hits += stream is not None
        self.counts.misses += stream is None
        return stream

    def claim(self, key: ImageKey, *, wait: bool) -> LeaseClaim | None:
        """The right to compile the image here. None: look again with `find`, another replica
        had it; it may still be at work, also after some waiting."""
        name = _lease_name(key)
        with _lease_errors_translated():
            if self._leases.acquire(name):
                # Since the caller looked, another one may have finished.
                if self._is_published(key, name):
                    return None
                return LeaseClaim(self._leases, name)
            deadline = time.monotonic() + WAIT_SECONDS
            while wait and self._leases.is_held(name) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return None

    def publish(self, key: ImageKey, path: Path) -> None:
        """Copies a whole image file there. One that is there already stays."""
        if path.stat().st_size > MAX_PUT_BYTES:
            logger.info("image too large to be shared", extra={"digest": key.digest})
            return
        self._bucket.put_if_absent(self._object(key), path)

    def remove(self, key: ImageKey) -> None:
        """Takes away an image that is damaged, or of a collected adapter; it may be absent."""
        self._bucket.delete([self._object(key)])

    def sweep(
        self, unknown: Callable[[list[str]], set[str]], unused_layouts: Collection[str]
    ) -> None:
        """Removes images of digests that are `unknown` by now, those for unused layouts, and those
        of earlier compilers."""
        for objects in self._bucket.keys(f"{FOLDER}/"):
            keys = {name: _image_key(name) for name in objects}
            gone = unknown(sorted({digest for digest, _ in keys.values()}))
            self._bucket.delete(
                [
                    name
                    for name, (digest, layout_id) in keys.items()
                    if digest in gone or layout_id in unused_layouts or _is_outdated(name)
                ]
            )

    def _is_published(self, key: ImageKey, lease: str) -> bool:
        try:
            size = self._bucket.size(self._object(key))
        except OSError:
            self._leases.release(lease)
            raise
        if size is not None:
            self._leases.release(lease)
        return size is not None

    def _object(self, key: ImageKey) -> str:
        digest, layout_id = (part.removeprefix("sha256:") for part in key)
        return f"{FOLDER}/{COMPILER_REVISION}/{layout_id}/{digest}.safetensors"


def _is_outdated(key: str) -> bool:
    """Whether an earlier compiler made it; a later one may be at work beside us."""
    revision = key.split("/")[1]
    return revision.isdecimal() and int(revision) < COMPILER_REVISION


def _image_key(name: str) -> ImageKey:
    path = Path(name)
    return ImageKey(f"sha256:{path.stem}", f"sha256:{path.parent.name}")


def _lease_name(key: ImageKey) -> str:
    return f"image:{key.digest}:{key.layout_id}"


@contextmanager
def _lease_errors_translated() -> Iterator[None]:
    try:
        yield
    except CatalogUnavailable as exc:
        raise OSError(str(exc)) from exc
