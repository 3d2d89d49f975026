"""Builds one image: from the disk tier, else from the shared tier, else from the blob.

Blocking; run it in a worker. `plan`, then `fill` into a buffer of the plan's size, then `store`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from adapter_store.blobs.local import Blobs
from adapter_store.blobs.volume import Volume
from adapter_store.catalog.images import ImageStates
from adapter_store.catalog.layouts import Layouts
from adapter_store.catalog.tables.image_states import ImageAccess
from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.core import ImageContent, ImageKey, ImageState, LayoutVerdict, Tenants
from adapter_store.errors import CorruptData, DiskFull, IncompatibleAdapter
from adapter_store.images.compile import compile_parts
from adapter_store.images.partial_image import PartialImage
from adapter_store.images.plan.announcement import content_of
from adapter_store.images.plan.layout import LayoutCache, no_layout
from adapter_store.images.plan.plan import ImagePlan, plan_image
from adapter_store.images.plan.scales import measured
from adapter_store.images.stored_source import StoredSources
from adapter_store.images.tiers.disk_tier import DiskTier, Removal
from adapter_store.images.tiers.file import open_image, read_header, read_parts, write_image
from adapter_store.images.tiers.shared_tier import Claim, SharedTier
from adapter_store.images.worker_pool import YieldPoint
from adapter_store.metrics.registry import Metrics
from contract.images.layouts import Layout
from servicekit.errors import NotFound, ServiceError

logger = logging.getLogger(__name__)

CLAIM_WAIT_SECONDS = 4.0
"""How long to wait for another replica. It may be alive and yet make no progress: its job yields to
pulls that wait for images which this replica has claimed in jobs that yield to this one."""


MAX_HIDDEN_SECONDS = 60.0
"""The longest build that a new record of known content is shown to take; a build that yields to
pulls may take longer."""

RETRY_SECONDS = 60.0
"""How long after a build that failed by a bug it is tried again."""
MAX_FAILED = 1024
"""How many builds are remembered, of which the traceback has been logged."""
EXPECTED = (ServiceError, OSError, MemoryError)
"""How a build may end without a bug."""


class NotPrecompiled(Exception):
    """The image is not precompiled now: it would evict others from the disk, or the volume has no
    space for it, or another replica has compiled it, or is doing so."""


@dataclass(eq=False, slots=True)
class Build:
    """One image being built: its inputs, and its progress."""

    key: ImageKey
    layout: Layout
    checkpoint: Checkpoint
    plan: ImagePlan
    is_precompile: bool
    start_s: float
    filled: PartialImage | None = None
    is_on_disk: bool = False
    is_compiled: bool = False
    claim: Claim | None = None
    compiling: Future[bool] | None = None

    @property
    def is_ephemeral(self) -> bool:
        """Whether its source is in memory alone: then it is not written to disk."""
        return isinstance(self.checkpoint.folder, MemoryFolder)

    @property
    def source(self) -> str:
        """Where its bytes came from: disk, blob or shared."""
        return "disk" if self.is_on_disk else "blob" if self.is_compiled else "shared"

    @property
    def content(self) -> ImageContent:
        """The contents of the image."""
        return content_of(self.plan, self.layout)

    def wait_compiling_recorded(self) -> None:
        """Returns when the verdict COMPILING, recorded concurrently, is in the catalog."""
        if self.compiling is not None:
            self.compiling.result()


class ImageBuilder:
    """Reads blobs, writes the disk tier and the catalog's verdicts. Blocking; several threads may
    build different images. `threads` runs small concurrent tasks."""

    def __init__(
        self,
        layouts: Layouts,
        states: ImageStates,
        blobs: Blobs,
        disk: DiskTier,
        volume: Volume,
        metrics: Metrics,
        delete_grace: timedelta,
        threads: Executor,
        verified: VerifiedCheckpoints,
        shared: SharedTier | None = None,
    ) -> None:
        self._registered = layouts
        self._states = states
        self._blobs = blobs
        self._disk = disk
        self._volume = volume
        self._metrics = metrics
        self._delete_grace = delete_grace
        self._threads = threads
        self._sources = StoredSources(blobs, verified, metrics)
        self._shared = shared
        self._layouts = LayoutCache(layouts)
        self._failed: OrderedDict[ImageKey, None] = OrderedDict()

    def plan(self, key: ImageKey, *, precompile: bool = False) -> Build:
        """Plans an image; none of its bytes are read yet.

        Raises NotFound (unknown layout; no record of the digest within the grace),
        IncompatibleAdapter (the recorded or new verdict, COMPILE_FAILED for a bug), CorruptData
        (the blob is damaged), and with `precompile` NotPrecompiled.
        """
        self.admit(key)
        build = self._plan(key, precompile)
        if precompile:
            self._claim_precompile(build)
        return build

    def check(self, key: ImageKey) -> None:
        """Records whether the adapter fits the layout; builds nothing. Raises as `plan`."""
        self._record_fits(self.plan(key))

    def plan_verdict(self, key: ImageKey) -> LayoutVerdict:
        """Plans an image, and returns and records what the plan says. It does not look at recorded
        verdicts: content that others have takes as long as new content, and looks like it.

        Raises as `plan`, but IncompatibleAdapter only if no record is for the layout's base model.
        """
        self._check_record(key)
        try:
            build = self._plan(key)
        except IncompatibleAdapter as error:
            return LayoutVerdict(key.layout_id, ImageState.INCOMPATIBLE, str(error))
        self._record_fits(build)
        return LayoutVerdict(key.layout_id, ImageState.PENDING, fits=True, content=build.content)

    def fill(self, build: Build, image: PartialImage, yield_point: YieldPoint) -> None:
        """Fills the image part by part: from the disk tier, else from the shared tier, else from
        the blob. Readers get each part at once.

        Raises IncompatibleAdapter and CorruptData; parts that were final stay so.
        """
        if build.is_ephemeral:
            self._compile(build, image, yield_point)
        elif not build.is_precompile and self._read_disk(build, image):
            build.is_on_disk = True
        elif not self._read_shared(build, image):
            self._compile(build, image, yield_point)
        image.complete()
        build.filled = image

    def store(self, build: Build) -> None:
        """Writes a filled image to the disk tier and the shared tier, and records its verdict.

        The tiers are caches: a full volume or an unavailable service is logged, not raised.
        """
        assert build.filled is not None
        path = None
        if not build.is_ephemeral:
            path = self._disk.path(build.key) if build.is_on_disk else self._write(build)
        if build.is_compiled:
            if self._shared is not None and path is not None:
                with _log_os_errors("image not shared"):
                    self._shared.publish(build.key, path)
            build.wait_compiling_recorded()
            if not self._set_verdict(
                build.key,
                ImageState.READY,
                image_bytes=build.plan.total_bytes,
                build_s=time.monotonic() - build.start_s,
                content=build.content,
            ):  # collected meanwhile, maybe before these files were there
                self._disk.remove(build.key, Removal.DELETED)
                if self._shared is not None:
                    with _log_os_errors("shared image left to be swept"):
                        self._shared.remove(build.key)

    def release_claim(self, build: Build) -> None:
        """Lets other replicas compile the image."""
        claim, build.claim = build.claim, None
        if claim is not None:
            with _log_os_errors("claim not released"):
                claim.release()

    def admit(self, key: ImageKey, tenants: Tenants = None) -> float:
        """Checks that one of these tenants may pull the image; returns for how many seconds they
        have to wait first, as for an image that is not built yet.

        Raises NotFound, and IncompatibleAdapter if that is recorded and they need not wait.
        """
        access = self._check_record(key, tenants)
        if access.verdict.state is ImageState.INCOMPATIBLE and not access.hidden_s:
            raise IncompatibleAdapter(access.verdict.reason, subject=key.digest)
        return access.hidden_s

    def _check_record(self, key: ImageKey, tenants: Tenants = None) -> ImageAccess:
        """Raises as `admit`, whatever the verdict is."""
        digest, layout_id = key
        access = self._states.access(key, self._delete_grace, tenants)
        if not access.has_record:
            raise NotFound(f"no adapter {digest}", subject=digest)
        if not access.serves_base:
            names = self._registered.bases(layout_id)
            if not names:
                raise no_layout(layout_id)
            raise IncompatibleAdapter(
                f"{digest} is not registered for base model {' or '.join(map(repr, names[:3]))}",
                subject="base_model",
                reason="WRONG_BASE",
            )
        return access

    def _plan(self, key: ImageKey, precompile: bool = False) -> Build:
        """Plans an image whose record was checked."""
        start_s = time.monotonic()
        layout = self._layouts.get(key.layout_id)
        with self._recording_verdict(key, start_s):
            checkpoint = self._sources.open(key.digest, lambda: self._check_record(key))
            plan = plan_image(checkpoint, layout, identity=key.layout_id)
        return Build(key, layout, checkpoint, plan, precompile, start_s)

    def _claim_precompile(self, build: Build) -> None:
        """Claims the image for this replica. Raises NotPrecompiled."""
        if build.is_ephemeral and self._blobs.has_memory:
            return
        num_bytes = build.plan.total_bytes
        has_space = self._disk.has_space(num_bytes) and self._volume.has_space(num_bytes)
        if build.is_ephemeral or not has_space:
            self._record_fits(build)
            raise NotPrecompiled
        if self._shared is not None:
            with _log_os_errors("the shared tier does not answer"):
                stream = self._shared.find(build.key, build.plan)
                if stream is not None:
                    stream.close()
                    self._set_verdict(
                        build.key,
                        ImageState.READY,
                        image_bytes=build.plan.total_bytes,
                        content=build.content,
                    )
                    raise NotPrecompiled
                build.claim = self._shared.claim(build.key, wait=False)
                if build.claim is None:
                    raise NotPrecompiled

    def _read_disk(self, build: Build, image: PartialImage) -> bool:
        """Reads the image from the disk tier; returns whether it is complete. A damaged file is
        removed."""
        path = self._disk.find(build.key)
        is_read = False
        if path is not None:
            try:
                with open_image(path) as file:
                    known = self._disk.is_verified(build.key, file.fileno())
                    recorded = read_header(file, build.plan, path.name)
                    image.set_plan(recorded.plan)
                    parts = read_parts(file, recorded, image.buffer, path.name, is_verified=known)
                    image.extend(parts)
                    if not known:
                        self._disk.set_verified(build.key, file.fileno())
                is_read = True
            except FileNotFoundError:  # evicted a moment ago
                pass
            except CorruptData as error:
                self._report_damage(error)
                self._disk.remove(build.key, Removal.DAMAGED)
        self._disk.count(is_read)
        return is_read

    def _read_shared(self, build: Build, image: PartialImage) -> bool:
        """Reads the image as another replica compiled it; returns whether it is complete. If not,
        this replica holds the claim, or nothing is shared, or waiting any longer is no use."""
        if self._shared is None:
            return False
        deadline = time.monotonic() + CLAIM_WAIT_SECONDS
        with _log_os_errors("the shared tier does not answer"):
            while build.claim is None and time.monotonic() < deadline:
                stream = self._shared.find(build.key, build.plan)
                if stream is not None:
                    with closing(stream):
                        name = f"shared image of {build.key.digest}"
                        try:
                            recorded = read_header(stream, build.plan, name)
                            image.set_plan(recorded.plan)
                            parts = read_parts(
                                stream, recorded, image.buffer, name, num_final=len(image.parts)
                            )
                            image.extend(parts)
                            return True
                        except CorruptData as error:
                            self._report_damage(error)
                            self._shared.remove(build.key)
                build.claim = self._shared.claim(build.key, wait=True)
        return False

    def _compile(self, build: Build, image: PartialImage, yield_point: YieldPoint) -> None:
        start = time.monotonic()
        build.is_compiled = True
        try:
            with self._recording_verdict(build.key, build.start_s, build):
                self._compile_parts(build, image, yield_point)
        except IncompatibleAdapter:
            raise
        except EXPECTED as error:
            self._metrics.compiles.labels("failed").inc()
            build.wait_compiling_recorded()
            self._set_verdict(build.key, ImageState.PENDING)
            if isinstance(error, CorruptData):
                raise self._sources.damaged(build.key.digest, str(error)) from error
            raise
        self._metrics.compiles.labels("ready").inc()
        self._metrics.compile_seconds.observe(time.monotonic() - start)

    def _compile_parts(self, build: Build, image: PartialImage, yield_point: YieldPoint) -> None:
        if not build.is_ephemeral:  # that is built in the time that a record takes
            build.compiling = self._threads.submit(
                self._set_verdict, build.key, ImageState.COMPILING, content=build.content
            )
        if not image.plan.has_scales:
            image.set_plan(measured(build.checkpoint, build.plan))
        parts = compile_parts(
            build.checkpoint,
            image.plan,
            image.buffer,
            num_final=len(image.parts),
            threads=self._threads,
        )
        with closing(parts):
            for part in parts:
                image.append(part)
                yield_point.wait()

    def _write(self, build: Build) -> Path | None:
        """Writes the image to the disk tier. Returns the file, if it is there now."""
        assert build.filled is not None
        written = None
        with _log_os_errors("image not written to disk"):
            self._volume.check_space(build.plan.total_bytes)
            path = self._disk.prepare(build.key, build.plan.total_bytes)
            if path is not None:
                write_image(path, build.filled.image)
                self._disk.add(build.key)
                written = path
        return written

    @contextmanager
    def _recording_verdict(
        self, key: ImageKey, start_s: float, build: Build | None = None
    ) -> Iterator[None]:
        """Records why the adapter does not fit, or that the build failed for a reason that nobody
        expects, which is tried again later. Raises IncompatibleAdapter for both."""
        retry_s = 0.0
        try:
            try:
                yield
            except EXPECTED:
                raise
            except Exception as error:
                retry_s = RETRY_SECONDS
                raise self._failure(key, error) from error
        except IncompatibleAdapter as error:
            self._metrics.compiles.labels("failed" if retry_s else "incompatible").inc()
            if build is not None:
                build.wait_compiling_recorded()
            build_s = time.monotonic() - start_s
            self._set_verdict(
                key, ImageState.INCOMPATIBLE, str(error), build_s=build_s, retry_s=retry_s
            )
            raise

    def _failure(self, key: ImageKey, error: Exception) -> IncompatibleAdapter:
        """Returns the verdict on a build that failed by a bug, whose traceback is logged once."""
        is_new = key not in self._failed
        self._failed[key] = None
        while len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)
        extra = {"digest": key.digest, "layout_id": key.layout_id, "why": repr(error)}
        logger.error("compiling failed", extra=extra, exc_info=error if is_new else None)
        return IncompatibleAdapter(
            f"the store failed to compile {key.digest} because of a bug ({type(error).__name__}): "
            f"see its log; it tries again after {RETRY_SECONDS:g} seconds",
            subject=key.digest,
            reason="COMPILE_FAILED",
        )

    def _record_fits(self, build: Build) -> None:
        build_micros = _micros(time.monotonic() - build.start_s)
        try:
            self._states.set_fits(build.key, build_micros, build.content)
        except DiskFull as error:  # what the plan says is known all the same
            logger.error("a verdict is not recorded", extra={"why": error.message})

    def _report_damage(self, error: CorruptData) -> None:
        logger.warning("damaged image; it is built again", extra={"why": str(error)})
        self._metrics.damaged_files.labels("image").inc()

    def _set_verdict(
        self,
        key: ImageKey,
        state: ImageState,
        reason: str = "",
        image_bytes: int = 0,
        build_s: float = 0.0,
        retry_s: float = 0.0,
        content: ImageContent | None = None,
    ) -> bool:
        """Returns False if the adapter has been collected meanwhile."""
        verdict = LayoutVerdict(
            key.layout_id,
            state,
            reason,
            image_bytes,
            _micros(build_s),
            retry_micros=int(retry_s * 1_000_000),
            content=content,
        )
        try:
            return self._states.set_verdict(key.digest, verdict)
        except DiskFull as error:  # the image can be pulled all the same
            logger.error("a verdict is not recorded", extra={"why": error.message})
            return True


def _micros(build_s: float) -> int:
    return int(min(build_s, MAX_HIDDEN_SECONDS) * 1_000_000)


@contextmanager
def _log_os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, DiskFull) as error:
        logger.error(what, extra={"why": str(error)})
