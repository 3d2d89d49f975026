"""Wires the store's parts together, without any transport, and takes them down in order."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from adapter_store.blobs.fsync import make_folder
from adapter_store.blobs.local import Blobs, LocalBlobs
from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.watch import Watch
from adapter_store.checkpoint.files import CheckpointLimits
from adapter_store.checkpoint.verified import VerifiedCheckpoints
from adapter_store.config import StoreSettings
from adapter_store.garbage_collector import Collector, SharedCollector
from adapter_store.images.builder import ImageBuilder
from adapter_store.images.cache import Images
from adapter_store.images.disk_tier import DiskTier
from adapter_store.images.plan import COMPILER_REVISION, IMAGE_FORMATS
from adapter_store.images.precompile import Ahead
from adapter_store.images.shared_tier import SharedTier
from adapter_store.images.worker_pool import Workers
from adapter_store.metrics.metrics import Metrics
from adapter_store.registration.policy import StorePolicyFile, open_policy
from adapter_store.registration.registrar import Registrar
from adapter_store.replication.leases import Leases
from adapter_store.replication.pin_refresh import Followed
from adapter_store.service import Registry
from adapter_store.sources import Sources
from adapter_store.sources.hub import HubSource
from adapter_store.sources.local import LocalSource
from adapter_store.sources.s3 import S3Source
from adapter_store.sources.staging import FetchLimits
from servicekit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

CALL_THREADS = 8
BESIDE_THREADS = 4
"""For what compiling does on the side: hashing, recording that it began."""


@dataclass(frozen=True, slots=True)
class Kept:
    """`images` is None where nothing is shared."""

    blobs: Blobs
    collector: Collector
    images: SharedTier | None


@dataclass(frozen=True, slots=True)
class Store:
    """A store at work."""

    catalog: Catalog
    images: Images
    ahead: Ahead
    watch: Watch
    registry: Registry
    metrics: Metrics
    policies: StorePolicyFile


@asynccontextmanager
async def open_store(settings: StoreSettings) -> AsyncIterator[Store]:
    """A store that works while the context lasts; then it finishes what it is writing.

    Raises FailedPrecondition if another process uses the data folder or the policy is not valid,
    CorruptData if the catalog is of another schema.
    """
    folder = settings.data_dir.absolute()
    grace = timedelta(seconds=settings.delete_grace_seconds)
    metrics = Metrics()
    policies = open_policy(settings.policy_file)
    stopping = threading.Event()
    async with AsyncExitStack() as stack:
        make_folder(folder)
        stack.callback(os.close, _lock_folder(folder))
        catalog = open_catalog(settings, folder, grace)
        stack.callback(catalog.close)
        disk = DiskTier(folder / "images", settings.disk_cache_bytes)
        if catalog.adopt_compiler(f"formats {IMAGE_FORMATS}, revision {COMPILER_REVISION}"):
            disk.clear()
        kept = open_kept(stack.enter_context(ExitStack()), settings, folder, catalog, disk)
        kept.collector.sweep()

        calls = _executor(stack, CALL_THREADS, "call")
        fetches = _executor(stack, settings.fetch_workers, "fetch")
        beside = _executor(stack, BESIDE_THREADS, "beside")
        workers = Workers(settings.compile_workers, "compile")
        stack.callback(workers.close)
        verified = VerifiedCheckpoints()
        builder = ImageBuilder(
            catalog, kept.blobs, disk, metrics, grace, beside, verified, kept.images
        )
        images = Images(builder, disk, workers, calls, settings.memory_bytes)
        stack.push_async_callback(images.close)
        ahead = Ahead(
            *(catalog, images, calls, settings.compile_workers),
            only_pinned=not settings.compile_ahead,
        )
        stack.push_async_callback(ahead.close)
        watch = Watch(catalog, calls, settings.bookmark_seconds)
        sources, limits = _sources(settings), _limits(settings)
        registrar = Registrar(
            catalog, kept.blobs, verified, sources, metrics, *limits, policies, stopping
        )
        registry = Registry(
            catalog, registrar, images, ahead, watch, metrics, policies, calls, fetches
        )
        registry.shared_counts = None if kept.images is None else kept.images.counts
        stack.push_async_callback(registry.layout_uses.settle)

        await registry.compile_ahead()
        work = _collect_for_ever(kept.collector, images, registry, calls, settings.collect_seconds)
        stack.push_async_callback(_cancel, asyncio.create_task(work))
        if catalog.is_shared:
            stack.callback(Followed(catalog, registry.refresh_pinned).close)
        stack.callback(stopping.set)  # nobody waits any more for what is still being fetched
        yield Store(catalog, images, ahead, watch, registry, metrics, policies)


def open_catalog(settings: StoreSettings, folder: Path, grace: timedelta) -> Catalog:
    """Raises CorruptData for one of another release, CatalogUnavailable."""
    dsn = settings.catalog_dsn
    return Catalog(
        folder / "catalog.sqlite3" if dsn is None else dsn.get_secret_value(),
        event_retention=settings.event_retention,
        delete_grace=grace,
        layout_ttl=timedelta(seconds=settings.layout_ttl_seconds),
    )


def open_kept(
    stack: ExitStack, settings: StoreSettings, folder: Path, catalog: Catalog, disk: DiskTier
) -> Kept:
    """`stack` ends what runs in the background for it."""
    grace = timedelta(seconds=settings.delete_grace_seconds)
    local = LocalBlobs(folder)
    if not settings.shared_s3:
        return Kept(local, Collector(catalog, local, disk, grace), None)
    endpoint = settings.shared_s3_endpoint_url or settings.s3_endpoint_url
    bucket = Bucket(settings.shared_s3, endpoint, settings.s3_region)
    leases = Leases(catalog, settings.lease_seconds)
    stack.callback(leases.close)
    blobs = SharedBlobs(local, bucket, catalog, leases, folder, settings.fetched_bytes)
    images = SharedTier(bucket, leases)
    return Kept(blobs, SharedCollector(catalog, blobs, disk, grace, images, leases), images)


def _sources(settings: StoreSettings) -> Sources:
    s3 = S3Source(settings.s3_buckets, settings.s3_endpoint_url, settings.s3_region)
    hub = HubSource(settings.hf_organizations, settings.hf_endpoint, settings.hf_cache_dir)
    return Sources({"file": LocalSource(settings.source_roots), "s3": s3, "hf": hub})


def _limits(settings: StoreSettings) -> tuple[FetchLimits, CheckpointLimits]:
    return (
        FetchLimits(
            settings.max_adapter_bytes, settings.max_file_bytes, settings.allow_pickle_files
        ),
        CheckpointLimits(max_source_bytes=settings.max_adapter_bytes, max_rank=settings.max_rank),
    )


def _lock_folder(folder: Path) -> int:
    """Makes this the only process that uses the folder, until the descriptor is closed."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise FailedPrecondition(
            f"data_dir: another store is using {folder}", subject="data_dir"
        ) from exc
    return fd


def _executor(stack: AsyncExitStack, num_threads: int, name: str) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    stack.callback(executor.shutdown, wait=True, cancel_futures=True)
    return executor


async def _collect_for_ever(
    collector: Collector,
    images: Images,
    registry: Registry,
    executor: ThreadPoolExecutor,
    seconds: float,
) -> None:
    loop = asyncio.get_running_loop()
    known_unused: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(seconds)
        try:
            images.forget(await loop.run_in_executor(executor, collector.collect))
            unused = await loop.run_in_executor(executor, collector.forget_layouts)
            if unused != known_unused:
                await registry.refresh_pinned()
                known_unused = unused
            images.forget_layouts(unused)
            await registry.follow_layouts()
        except Exception:
            logger.exception("collecting failed; it will be tried again")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
