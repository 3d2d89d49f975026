"""Makes one image: from the disk tier, else from the blob. Blocking; run it in a worker."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from adapter_store.blobs import Blobs
from adapter_store.catalog import Catalog, ImageKey
from adapter_store.checkpoint import Checkpoint, CheckpointLimits, open_checkpoint
from adapter_store.core import ImageState, Layout, LayoutVerdict, Tenants
from adapter_store.errors import CorruptData, IncompatibleAdapter, InvalidAdapter, NotFound
from adapter_store.image import Image, ImagePlan, allocate_buffer, compile_parts, plan_image
from adapter_store.image_file import ImageStream, read_image, write_image
from adapter_store.layout import from_json
from adapter_store.metrics import Metrics
from adapter_store.tiers import DiskTier

logger = logging.getLogger(__name__)

# What was taken in stays servable when the limits for new adapters become tighter.
_NO_LIMITS = CheckpointLimits(
    max_config_bytes=1 << 30,
    max_header_bytes=1 << 30,
    max_tensors=1 << 30,
    max_source_bytes=1 << 62,
    max_rank=1 << 30,
    max_match_seconds=1e9,
)


class NoRoomAhead(Exception):
    """Compiling ahead fills free disk space only: this image waits until it is asked for."""


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
        had it; without `wait` it may still be at work, and nothing is waited for."""

    def publish(self, key: ImageKey, path: Path) -> None:
        """Copies a whole image file there. One that is there already stays."""

    def remove(self, key: ImageKey) -> None:
        """Takes away an image that is damaged; it may be absent."""


class ImageBuilder:
    """Reads blobs, writes the disk tier and the catalog's verdicts."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: Blobs,
        disk: DiskTier,
        metrics: Metrics,
        delete_grace: timedelta,
    ) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._disk = disk
        self._metrics = metrics
        self._delete_grace = delete_grace
        self._layouts: dict[str, Layout] = {}

    def build(self, key: ImageKey, *, ahead: bool = False) -> Image:
        """The image of (digest, layout_id), verified.

        Raises NotFound (unknown layout; no record of the digest within the grace),
        IncompatibleAdapter (the recorded or new verdict), CorruptData (the blob is damaged), and
        with `ahead` NoRoomAhead.
        """
        layout = self.check(key)
        checkpoint = self._open(key)
        try:
            plan = plan_image(checkpoint, layout, base_model=layout.base_model)
            image = None if ahead else self._read(key, plan)
            if image is None:
                image = self._compile(key, checkpoint, layout, plan, ahead)
        except IncompatibleAdapter as error:
            self._metrics.compiles.labels("incompatible").inc()
            self._settle(key, ImageState.INCOMPATIBLE, str(error))
            raise
        return image

    def check(self, key: ImageKey, tenants: Tenants = None) -> Layout:
        """Whether the image may be pulled now, for one of these tenants; gives its layout.

        Raises NotFound, and IncompatibleAdapter for what is known to be so already.
        """
        digest, layout_id = key
        layout = self._layout(layout_id)
        standing = self._catalog.standing(key, self._delete_grace, tenants)
        if not standing.has_record:
            raise NotFound(f"no adapter {digest}", subject=digest)
        if not standing.serves_base:
            raise IncompatibleAdapter(
                f"{digest} is not registered for base model {layout.base_model!r}",
                subject="base_model",
                reason="WRONG_BASE",
            )
        if standing.verdict.state is ImageState.INCOMPATIBLE:
            raise IncompatibleAdapter(standing.verdict.reason, subject=digest)
        return layout

    def _layout(self, layout_id: str) -> Layout:
        layout = self._layouts.get(layout_id)
        if layout is None:
            body = self._catalog.layout_body(layout_id)
            if body is None:
                raise NotFound(f"no layout {layout_id}; register it", subject=layout_id)
            layout = self._layouts[layout_id] = from_json(body)
        return layout

    def _open(self, key: ImageKey) -> Checkpoint:
        digest = key[0]
        try:
            return open_checkpoint(self._blobs.path(digest), _NO_LIMITS, digest=digest)
        except InvalidAdapter as error:  # it was valid when it was kept
            self.check(key)  # unless it has been collected meanwhile
            raise self._damaged_blob(digest, str(error)) from error

    def _read(self, key: ImageKey, plan: ImagePlan) -> Image | None:
        """From the disk tier; a damaged file is dropped, to be built anew."""
        path = self._disk.find(key)
        image = None
        if path is not None:
            try:
                image = read_image(path, plan)
            except FileNotFoundError:  # evicted a moment ago
                pass
            except CorruptData as error:
                logger.warning("damaged image; building it anew", extra={"why": str(error)})
                self._metrics.damaged_files.labels("image").inc()
                self._disk.remove(key)
        self._disk.count(image is not None)
        return image

    def _compile(
        self, key: ImageKey, checkpoint: Checkpoint, layout: Layout, plan: ImagePlan, ahead: bool
    ) -> Image:
        if ahead and not self._disk.has_room(plan.total_bytes):
            raise NoRoomAhead
        self._settle(key, ImageState.COMPILING)
        start = time.monotonic()
        buffer = allocate_buffer(plan.total_bytes)
        try:
            parts = tuple(compile_parts(checkpoint, layout, plan, buffer))
        except IncompatibleAdapter:
            raise
        except BaseException as error:
            self._metrics.compiles.labels("failed").inc()
            self._settle(key, ImageState.PENDING)
            if isinstance(error, CorruptData):
                raise self._damaged_blob(key[0], str(error)) from error
            raise
        self._metrics.compiles.labels("ready").inc()
        self._metrics.compile_seconds.observe(time.monotonic() - start)
        image = Image(plan, buffer, parts)
        self._write(key, image)
        self._settle(key, ImageState.READY, image_bytes=plan.total_bytes)
        return image

    def _write(self, key: ImageKey, image: Image) -> None:
        """Into the disk tier. It is a cache: that a disk is full must not fail a pull."""
        try:
            path = self._disk.prepare(key, image.plan.total_bytes)
            if path is not None:
                write_image(path, image)
                self._disk.add(key)
        except OSError as error:
            logger.error("image not written to disk", extra={"why": str(error)})

    def _settle(
        self, key: ImageKey, state: ImageState, reason: str = "", image_bytes: int = 0
    ) -> None:
        self._catalog.set_verdict(key[0], LayoutVerdict(key[1], state, reason, image_bytes))

    def _damaged_blob(self, digest: str, why: str) -> CorruptData:
        logger.error("damaged blob", extra={"digest": digest, "why": why})
        self._metrics.damaged_files.labels("blob").inc()
        return CorruptData(
            f"the kept source of {digest} is damaged; register the adapter again", subject=digest
        )
