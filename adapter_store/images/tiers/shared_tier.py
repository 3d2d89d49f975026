"""Compiled images that all replicas of a store share, so that only one of them compiles.

    compiled/<compiler>/<layout>/<digest>.safetensors     as in the disk tier; written once

An object is complete or absent, and never changes: it is written only if it is absent. The right to
compile is a lease in the catalog, which expires if a replica dies while compiling. The tier is a
cache: failures are OSErrors, and images are compiled without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapter_store.blobs.s3_prefix import MAX_PUT_BYTES, Bucket, ObjectStream
from adapter_store.core import ImageKey
from adapter_store.errors import CatalogUnavailable
from adapter_store.images.plan.plan import COMPILER_REVISION, ImagePlan
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.replication.lease_renewal import Leases

logger = logging.getLogger(__name__)

FOLDER = "compiled"
POLL_SECONDS = 0.1
WAIT_SECONDS = 1.0


class Claim:
    """The right to compile one image, which no other replica has meanwhile."""

    def __init__(self, leases: Leases, key: str) -> None:
        self._leases = leases
        self._key = key

    def release(self) -> None:
        """Gives the right up; other replicas find the image that was published before."""
        self._leases.release(self._key)


class SharedTier:
    """Images in an S3 prefix. Blocking and thread-safe. Ignores images of other compilers.

    The tier is a cache: when it does not answer (OSError), images are compiled here.
    """

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

    def claim(self, key: ImageKey, *, wait: bool) -> Claim | None:
        """Returns the right to compile the image here, or None: another replica had it, and may
        still be compiling, so call `find` again. With `wait`, waits a moment before that."""
        name = _lease_name(key)
        with _translate_lease_errors():
            if self._leases.acquire(name):
                # Another replica may have finished since the caller's `find`.
                if self._is_published(key, name):
                    return None
                return Claim(self._leases, name)
            deadline = time.monotonic() + WAIT_SECONDS
            while wait and self._leases.is_held(name) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return None

    def publish(self, key: ImageKey, path: Path) -> None:
        """Copies a complete image file to the tier, unless it is there already."""
        if path.stat().st_size > MAX_PUT_BYTES:
            logger.info("image too large to be shared", extra={"digest": key.digest})
            return
        self._bucket.put_if_absent(self._object(key), path)

    def remove(self, key: ImageKey) -> None:
        """Removes an image that is damaged, or of a collected adapter. It may be absent."""
        self._bucket.delete([self._object(key)])

    def sweep(
        self, unknown: Callable[[list[str]], set[str]], unused_layouts: Collection[str]
    ) -> None:
        """Removes images of digests that are `unknown`, for unused layouts, and of earlier
        compilers."""
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
    """Returns whether an earlier compiler made the image; a later one may run in another
    replica."""
    revision = key.split("/")[1]
    return revision.isdecimal() and int(revision) < COMPILER_REVISION


def _image_key(name: str) -> ImageKey:
    path = Path(name)
    return ImageKey(f"sha256:{path.stem}", f"sha256:{path.parent.name}")


def _lease_name(key: ImageKey) -> str:
    return f"image:{key.digest}:{key.layout_id}"


@contextmanager
def _translate_lease_errors() -> Iterator[None]:
    try:
        yield
    except CatalogUnavailable as exc:
        raise OSError(str(exc)) from exc
