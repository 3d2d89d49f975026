"""Makes the parts of a store, and closes them in order."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from adapter_store.blobs.fsync import make_folder
from adapter_store.blobs.local import Blobs, LocalBlobs
from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.blobs.volume import Volume
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.layouts import LayoutLimits
from adapter_store.catalog.watch import Watch
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.config import StoreSettings
from adapter_store.garbage_collector import Collector, SharedCollector
from adapter_store.images.builder import ImageBuilder
from adapter_store.images.plan.plan import COMPILER
from adapter_store.images.precompile import Precompiler
from adapter_store.images.share import Offers, ShareSocket
from adapter_store.images.stored_source import StoredSources
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.images.tiers.disk_tier import DiskTier
from adapter_store.images.tiers.memory_lock import MemoryLock
from adapter_store.images.tiers.memory_tier import MARGIN_BYTES
from adapter_store.images.tiers.shared_tier import SharedTier
from adapter_store.images.worker_pool import WorkerPool
from adapter_store.metrics.registry import Metrics
from adapter_store.registration.registrar import Registrar
from adapter_store.registration.tenant_policy import StorePolicyFile, open_policy
from adapter_store.replication.lease_renewal import Leases
from adapter_store.replication.pin_refresh import PinRefresher
from adapter_store.service.calls import Places
from adapter_store.service.use_cases import UseCases, make_use_cases
from adapter_store.service.warm_images import StandingImages
from adapter_store.sources import Sources
from adapter_store.sources.hub import HubSource
from adapter_store.sources.limits import FetchLimits
from adapter_store.sources.local import LocalSource
from adapter_store.sources.s3 import S3Source
from adapter_store.sources.transfer import FetchRunner
from servicekit.errors import FailedPrecondition
from servicekit.pace import Pace
from servicekit.shares import INTERNAL, FairExecutor, Shares
from servicekit.work_budget import WorkBudget

logger = logging.getLogger(__name__)

CALL_THREADS = 8
INTERRUPT_THREADS = 2
LIST_PROCESSORS, LIST_WAIT_SECONDS = 0.2, 2.0
"""The processor time that one account's lists may take on average: fifty pages of a hundred
adapters each second; and how long one waits for its turn, which inference services that list for
others wait for."""
FETCHES_PER_WORKER = 4
"""Fetches that a worker may have: fetches of sources it has left go on until they notice. Few
enough for the pools of connections of the sources' clients."""
DUE_SECONDS = 1.0
"""How often versions are looked for whose time to live has ended, and ephemeral ones to remove."""
HELPER_THREADS = 4
"""They fill and hash the parts of images that workers compile, and record that they began."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The contents of the data folder besides the catalog, and its volume."""

    path: Path
    blobs: LocalBlobs
    disk: DiskTier
    volume: Volume


@dataclass(frozen=True, slots=True)
class Storage:
    """Where blobs and images are stored. `images` is None unless they are shared."""

    blobs: Blobs
    collector: Collector
    images: SharedTier | None


@dataclass(frozen=True, slots=True)
class Store:
    """The parts of a running store."""

    volume: Volume
    catalog: Catalog
    images: ImageCache
    precompiler: Precompiler
    watch: Watch
    use_cases: UseCases
    metrics: Metrics
    policies: StorePolicyFile


@asynccontextmanager
async def open_store(settings: StoreSettings) -> AsyncIterator[Store]:
    """Opens a store that runs while the context lasts, and then finishes its writes.

    Raises FailedPrecondition if another process uses the data folder or the policy is not valid,
    CorruptData if the catalog has another schema.
    """
    policies = open_policy(settings.policy_file)
    metrics, stopping, verified = Metrics(), threading.Event(), VerifiedCheckpoints()
    async with AsyncExitStack() as stack:
        data = _open_folder(stack, settings)
        catalog = _open_catalog(stack, settings, data)
        storage = open_storage(stack.enter_context(ExitStack()), settings, data, catalog)
        sweep(settings, catalog, storage)
        data.volume.restore()

        places = _places(stack, settings)
        images, precompiler = _open_images(
            stack, settings, catalog, data, storage, metrics, verified, places
        )
        watch = Watch(catalog.history, places.calls, settings.bookmark_seconds, places.watches)
        registrar = _registrar(
            settings,
            catalog,
            data.volume,
            storage,
            verified,
            metrics,
            policies,
            stopping,
            places,
            images,
        )
        use_cases = make_use_cases(
            catalog,
            registrar,
            StoredSources(storage.blobs, verified, metrics),
            images,
            precompiler,
            watch,
            metrics,
            policies,
            places,
            None if storage.images is None else storage.images.counts,
            await _open_share_socket(stack, settings, places.share),
        )
        stack.push_async_callback(use_cases.close)

        standing = use_cases.standing
        await standing.precompile_missing()
        upkeep = places.calls.of(INTERNAL)
        _start_upkeep(stack, settings, storage.collector, data.volume, images, standing, upkeep)
        if catalog.history.is_shared:
            stack.callback(PinRefresher(catalog.history, standing.refresh_pinned).close)
        stack.callback(stopping.set)  # callers no longer wait for fetches
        yield Store(data.volume, catalog, images, precompiler, watch, use_cases, metrics, policies)


def _open_catalog(stack: AsyncExitStack, settings: StoreSettings, data: DataFolder) -> Catalog:
    """Opens the catalog; images of another compiler are forgotten."""
    catalog = open_catalog(settings, data)
    stack.callback(catalog.close)
    if catalog.images.adopt_compiler(COMPILER):
        data.disk.clear()
    return catalog


def _open_images(
    stack: AsyncExitStack,
    settings: StoreSettings,
    catalog: Catalog,
    data: DataFolder,
    storage: Storage,
    metrics: Metrics,
    verified: VerifiedCheckpoints,
    places: Places,
) -> tuple[ImageCache, Precompiler]:
    """Opens the tiers of images and the workers that compile them, as long as the stack lasts."""
    helpers = ThreadPoolExecutor(HELPER_THREADS, thread_name_prefix="helpers")
    stack.callback(helpers.shutdown, wait=True, cancel_futures=True)
    workers = WorkerPool(settings.compile_workers, "compile")
    stack.callback(workers.close)
    builder = ImageBuilder(
        catalog.layouts,
        catalog.images,
        storage.blobs,
        data.disk,
        data.volume,
        metrics,
        _grace(settings),
        helpers,
        verified,
        storage.images,
    )
    images = ImageCache(
        builder,
        data.disk,
        workers,
        places.calls,
        settings.image_memory,
        places.share,
        MemoryLock(settings.lock_images, settings.image_memory + MARGIN_BYTES),
        settings.share_socket is not None,
    )
    stack.push_async_callback(images.close)
    precompiler = Precompiler(
        catalog.layouts,
        catalog.images,
        images,
        places.calls.of(INTERNAL),
        settings.compile_workers,
        only_pinned=not settings.compile_ahead,
    )
    stack.push_async_callback(precompiler.close)
    return images, precompiler


async def _open_share_socket(
    stack: AsyncExitStack, settings: StoreSettings, share: float
) -> Offers | None:
    """Hands out images over the socket as long as the stack lasts."""
    if settings.share_socket is None:
        return None
    offers = Offers(share)
    users = frozenset(map(int, settings.share_users))
    stack.push_async_callback(ShareSocket(settings.share_socket, users, offers).close)
    return offers


def _registrar(
    settings: StoreSettings,
    catalog: Catalog,
    volume: Volume,
    storage: Storage,
    verified: VerifiedCheckpoints,
    metrics: Metrics,
    policies: StorePolicyFile,
    stopping: threading.Event,
    places: Places,
    images: ImageCache,
) -> Registrar:
    sources, limits = _sources(settings), _limits(settings)
    loop = asyncio.get_running_loop()

    def make_room(tenant: str | None) -> None:
        gone = storage.collector.make_room(tenant)
        with suppress(RuntimeError):  # the loop has ended, and the images with it
            loop.call_soon_threadsafe(images.drop_digests, gone)

    return Registrar(
        catalog.names,
        catalog.blobs,
        storage.blobs,
        volume,
        verified,
        sources,
        metrics,
        *limits,
        policies,
        stopping,
        FetchRunner(places.pace, places.share, FETCHES_PER_WORKER * settings.fetch_workers),
        places.staged_bytes,
        places.ephemeral_bytes,
        make_room,
    )


def _open_folder(stack: AsyncExitStack, settings: StoreSettings) -> DataFolder:
    """Opens the data folder, locked as long as the stack lasts, with space for a catalog."""
    folder = settings.data_dir.absolute()
    make_folder(folder)
    _lock_folder(stack, folder)
    blobs, disk = LocalBlobs(folder), DiskTier(folder / "images", settings.disk_cache_bytes)
    blobs.sweep_leftovers()
    volume = Volume(folder, disk.evict)
    volume.make_room()
    return DataFolder(folder, blobs, disk, volume)


def open_catalog(settings: StoreSettings, data: DataFolder) -> Catalog:
    """Raises CorruptData for a catalog of a newer release, CatalogUnavailable, DiskFull."""
    dsn = settings.catalog_dsn
    return Catalog(
        data.path / "catalog.sqlite3" if dsn is None else dsn.get_secret_value(),
        event_retention=settings.event_retention,
        delete_grace=_grace(settings),
        layout_ttl=timedelta(seconds=settings.layout_ttl_seconds),
        layout_limits=LayoutLimits(
            settings.max_layouts, settings.max_layouts_in_all, tenant_share(settings)
        ),
        space=data.volume,
    )


def sweep(settings: StoreSettings, catalog: Catalog, storage: Storage) -> None:
    """Removes leftovers of crashes. Raises FailedPrecondition for a catalog that has never had a
    record, beside sources that one had recorded: they would be removed as nobody's."""
    # In this order: another replica may be making the first record.
    was_recorded = storage.blobs.was_recorded()
    if was_recorded and catalog.history.revision() == 0 and not settings.allow_empty_catalog:
        raise FailedPrecondition(
            "--data-dir: the catalog is empty, but sources are stored "
            f"({settings.shared_s3 or settings.data_dir}): restore the catalog from a "
            "backup, or start with --allow-empty-catalog, which removes them",
            subject="allow_empty_catalog",
            reason="CATALOG_EMPTY",
        )
    storage.collector.sweep()


def _grace(settings: StoreSettings) -> timedelta:
    return timedelta(seconds=settings.delete_grace_seconds)


def open_storage(
    stack: ExitStack, settings: StoreSettings, data: DataFolder, catalog: Catalog
) -> Storage:
    """Opens local or shared storage. `stack` stops its background threads."""
    local, disk, grace = data.blobs, data.disk, _grace(settings)
    ephemeral = timedelta(seconds=settings.ephemeral_grace_seconds)
    if not settings.shared_s3:
        return Storage(local, Collector(catalog, local, disk, grace, ephemeral), None)
    endpoint = settings.shared_s3_endpoint_url or settings.s3_endpoint_url
    bucket = Bucket(settings.shared_s3, endpoint, settings.s3_region)
    leases = Leases(catalog.leases, settings.lease_seconds)
    stack.callback(leases.close)
    blobs = SharedBlobs(local, bucket, catalog.blobs, leases, data.volume, settings.fetched_bytes)
    images = SharedTier(bucket, leases)
    collector = SharedCollector(catalog, blobs, disk, grace, images, leases, ephemeral)
    return Storage(blobs, collector, images)


def _sources(settings: StoreSettings) -> Sources:
    s3 = S3Source(settings.s3_buckets, settings.s3_endpoint_url, settings.s3_region)
    hub = HubSource(
        settings.hf_organizations,
        settings.hf_endpoint,
        settings.hf_cache_dir,
        redirect_hosts=settings.hf_redirect_hosts,
    )
    return Sources({"file": LocalSource(settings.source_roots), "s3": s3, "hf": hub})


def _limits(settings: StoreSettings) -> tuple[FetchLimits, CheckpointLimits]:
    return (
        FetchLimits(
            settings.max_adapter_bytes, settings.max_file_bytes, settings.allow_pickle_files
        ),
        CheckpointLimits(
            max_source_bytes=settings.max_adapter_bytes,
            max_rank=settings.max_rank,
            allowed_config_keys=frozenset(settings.allow_config_keys),
        ),
    )


def _lock_folder(stack: AsyncExitStack, folder: Path) -> None:
    """Locks the folder against other processes for as long as the stack lasts. The folder itself:
    a file in it can be removed. Releases up to 0.2 lock the file `lock`, and file systems over a
    network no folders."""
    for path, flags in ((folder, os.O_DIRECTORY), (folder / "lock", os.O_RDWR | os.O_CREAT)):
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise FailedPrecondition(
                f"--data-dir: another store is using {folder}: stop it, or choose another folder",
                subject="data_dir",
            ) from exc
        except OSError:
            if path != folder:
                raise


def tenant_share(settings: StoreSettings) -> float:
    """Without a policy all callers are one tenant."""
    return 1.0 if settings.policy_file is None else settings.tenant_share


def _places(stack: AsyncExitStack, settings: StoreSettings) -> Places:
    share = tenant_share(settings)
    calls = FairExecutor(CALL_THREADS, "calls", share)
    stack.callback(calls.close)
    fetches = FairExecutor(settings.fetch_workers, "fetch_workers", share)
    stack.callback(fetches.close)
    interrupts = FairExecutor(INTERRUPT_THREADS, "interrupts", share)
    stack.callback(interrupts.close)
    return Places(
        share,
        calls,
        fetches,
        interrupts,
        Shares("uploads", settings.max_uploads, share, setting="--max-uploads"),
        Shares("watches", settings.max_watches, share, setting="setting max-watches"),
        Shares("pulled_bytes", settings.image_memory, share, setting="--image-memory"),
        Shares("staged_bytes", settings.staging_bytes, share, setting="setting staging-bytes"),
        Shares("ephemeral_bytes", settings.ephemeral_memory, share, setting="--ephemeral-memory"),
        WorkBudget("list_work", share, LIST_PROCESSORS, LIST_WAIT_SECONDS),
        Pace(settings.min_transfer_rate, settings.transfer_stall_seconds),
    )


def _start_upkeep(
    stack: AsyncExitStack,
    settings: StoreSettings,
    collector: Collector,
    volume: Volume,
    images: ImageCache,
    standing: StandingImages,
    executor: Executor,
) -> None:
    """Collects in the background as long as the stack lasts."""
    work = _collect_periodically(
        collector, volume, images, standing, executor, settings.collect_seconds
    )
    stack.push_async_callback(_cancel, asyncio.create_task(work))


async def _collect_periodically(
    collector: Collector,
    volume: Volume,
    images: ImageCache,
    standing: StandingImages,
    executor: Executor,
    seconds: float,
) -> None:
    """Collects all every `seconds`, and due items in between; restores the volume's reserve. Logs
    once why it fails, until it has worked again: a catalog that does not answer is asked every
    second."""
    loop = asyncio.get_running_loop()
    unused: frozenset[str] = frozenset()
    next_s = time.monotonic() + seconds
    is_failing = False
    while True:
        await asyncio.sleep(min(seconds, DUE_SECONDS))
        try:
            images.drop_digests(await loop.run_in_executor(executor, collector.collect_due))
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + seconds
                unused = await _collect(collector, images, standing, executor, unused)
            await loop.run_in_executor(executor, volume.restore)
        except Exception:
            if not is_failing:
                logger.exception("collecting failed; trying again")
            is_failing = True
        else:
            is_failing = False


async def _collect(
    collector: Collector,
    images: ImageCache,
    standing: StandingImages,
    executor: Executor,
    known_unused: frozenset[str],
) -> frozenset[str]:
    """Collects all; returns the layouts that are unused now. `known_unused` were before."""
    loop = asyncio.get_running_loop()
    images.drop_digests(await loop.run_in_executor(executor, collector.collect))
    unused = await loop.run_in_executor(executor, collector.drop_unused_layouts)
    if unused != known_unused:
        await standing.refresh_pinned()
    images.drop_layouts(unused)
    await standing.queue_new_layouts()
    return unused


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
