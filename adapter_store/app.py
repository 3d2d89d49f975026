"""Wires the store's parts together, without any transport, and stops them in order."""

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
from adapter_store.images.cache import ImageCache
from adapter_store.images.disk_tier import DiskTier
from adapter_store.images.plan import COMPILER_REVISION, IMAGE_FORMATS
from adapter_store.images.precompile import Precompiler
from adapter_store.images.shared_tier import SharedTier
from adapter_store.images.worker_pool import WorkerPool
from adapter_store.metrics.metrics import Metrics
from adapter_store.registration.policy import StorePolicyFile, open_policy
from adapter_store.registration.registrar import Registrar
from adapter_store.replication.leases import Leases
from adapter_store.replication.pin_refresh import PinRefresher
from adapter_store.service import StoreService
from adapter_store.sources import Sources
from adapter_store.sources.hub import HubSource
from adapter_store.sources.local import LocalSource
from adapter_store.sources.s3 import S3Source
from adapter_store.sources.staging import FetchLimits
from servicekit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

CALL_THREADS = 8
HELPER_THREADS = 4
"""For small tasks concurrent to compiling: hashing, recording the start."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where blobs and images are stored. `images` is None unless they are shared."""

    blobs: Blobs
    collector: Collector
    images: SharedTier | None


@dataclass(frozen=True, slots=True)
class Store:
    """The parts of a running store."""

    catalog: Catalog
    images: ImageCache
    precompiler: Precompiler
    watch: Watch
    service: StoreService
    metrics: Metrics
    policies: StorePolicyFile


@asynccontextmanager
async def open_store(settings: StoreSettings) -> AsyncIterator[Store]:
    """Opens a store that runs while the context lasts, and then finishes what it is writing.

    Raises FailedPrecondition if another process uses the data folder or the policy is not valid,
    CorruptData if the catalog has another schema.
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
        storage = open_storage(stack.enter_context(ExitStack()), settings, folder, catalog, disk)
        storage.collector.sweep()

        calls = _executor(stack, CALL_THREADS, "call")
        fetches = _executor(stack, settings.fetch_workers, "fetch")
        helpers = _executor(stack, HELPER_THREADS, "helpers")
        workers = WorkerPool(settings.compile_workers, "compile")
        stack.callback(workers.close)
        verified = VerifiedCheckpoints()
        builder = ImageBuilder(
            catalog, storage.blobs, disk, metrics, grace, helpers, verified, storage.images
        )
        images = ImageCache(builder, disk, workers, calls, settings.memory_bytes)
        stack.push_async_callback(images.close)
        precompiler = Precompiler(
            *(catalog, images, calls, settings.compile_workers),
            only_pinned=not settings.compile_ahead,
        )
        stack.push_async_callback(precompiler.close)
        watch = Watch(catalog, calls, settings.bookmark_seconds)
        sources, limits = _sources(settings), _limits(settings)
        registrar = Registrar(
            catalog, storage.blobs, verified, sources, metrics, *limits, policies, stopping
        )
        service = StoreService(
            catalog, registrar, images, precompiler, watch, metrics, policies, calls, fetches
        )
        service.shared_counts = None if storage.images is None else storage.images.counts
        stack.push_async_callback(service.layout_usage.wait_idle)

        await service.precompile_missing()
        work = _collect_periodically(
            storage.collector, images, service, calls, settings.collect_seconds
        )
        stack.push_async_callback(_cancel, asyncio.create_task(work))
        if catalog.is_shared:
            stack.callback(PinRefresher(catalog, service.refresh_pinned).close)
        stack.callback(stopping.set)  # callers no longer wait for fetches
        yield Store(catalog, images, precompiler, watch, service, metrics, policies)


def open_catalog(settings: StoreSettings, folder: Path, grace: timedelta) -> Catalog:
    """Raises CorruptData for a catalog of a newer release, CatalogUnavailable."""
    dsn = settings.catalog_dsn
    return Catalog(
        folder / "catalog.sqlite3" if dsn is None else dsn.get_secret_value(),
        event_retention=settings.event_retention,
        delete_grace=grace,
        layout_ttl=timedelta(seconds=settings.layout_ttl_seconds),
    )


def open_storage(
    stack: ExitStack, settings: StoreSettings, folder: Path, catalog: Catalog, disk: DiskTier
) -> Storage:
    """Opens local or shared storage. `stack` stops its background threads."""
    grace = timedelta(seconds=settings.delete_grace_seconds)
    local = LocalBlobs(folder)
    if not settings.shared_s3:
        return Storage(local, Collector(catalog, local, disk, grace), None)
    endpoint = settings.shared_s3_endpoint_url or settings.s3_endpoint_url
    bucket = Bucket(settings.shared_s3, endpoint, settings.s3_region)
    leases = Leases(catalog, settings.lease_seconds)
    stack.callback(leases.close)
    blobs = SharedBlobs(local, bucket, catalog, leases, folder, settings.fetched_bytes)
    images = SharedTier(bucket, leases)
    return Storage(blobs, SharedCollector(catalog, blobs, disk, grace, images, leases), images)


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
    """Locks the folder against other processes until the returned descriptor is closed."""
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


async def _collect_periodically(
    collector: Collector,
    images: ImageCache,
    service: StoreService,
    executor: ThreadPoolExecutor,
    seconds: float,
) -> None:
    loop = asyncio.get_running_loop()
    known_unused: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(seconds)
        try:
            images.drop_digests(await loop.run_in_executor(executor, collector.collect))
            unused = await loop.run_in_executor(executor, collector.drop_unused_layouts)
            if unused != known_unused:
                await service.refresh_pinned()
                known_unused = unused
            images.drop_layouts(unused)
            await service.queue_new_layouts()
        except Exception:
            logger.exception("collecting failed; trying again")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
