"""Wires the store together, serves it, and takes it down in order."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from adapter_store.ahead import Ahead
from adapter_store.blobs import Blobs
from adapter_store.builder import ImageBuilder
from adapter_store.catalog import Catalog
from adapter_store.checkpoint import CheckpointLimits
from adapter_store.collector import Collector
from adapter_store.config import Settings, split_address
from adapter_store.durable import make_folder, write_atomically
from adapter_store.errors import PreconditionFailed
from adapter_store.image import COMPILER_REVISION, IMAGE_FORMATS
from adapter_store.images import Images
from adapter_store.metrics import Metrics, Sample
from adapter_store.registration import Registrar
from adapter_store.registry import Registry
from adapter_store.servicer import AdapterStoreServicer
from adapter_store.sources import FetchLimits, Sources
from adapter_store.sources.local import LocalSource
from adapter_store.sources.s3 import S3Source
from adapter_store.status import StatusInterceptor
from adapter_store.tiers import DiskTier
from adapter_store.watch import Watch
from adapter_store.workers import Workers
from loadout.adapter_store.v1 import adapter_store_pb2, adapter_store_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE = adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"].full_name
MAX_MESSAGE_BYTES = 64 << 20  # the layout of a large model; a page of labelled adapters
CALL_THREADS = 8

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second store on the port is an error, not a lottery
    # Streams are long and may be silent; a peer that is gone must not hold an image.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class RunningStore:
    """Addresses are HOST:PORT with the real ports."""

    grpc_address: str
    metrics_address: str
    registry: Registry
    images: Images
    ahead: Ahead
    catalog: Catalog


@asynccontextmanager
async def running_store(settings: Settings) -> AsyncIterator[RunningStore]:
    """A store that serves while the context lasts; leaving it drains and takes everything down.

    Raises PreconditionFailed if another store has the data folder, OSError if an address is taken.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        stopping = threading.Event()
        folder = settings.data_dir.absolute()
        make_folder(folder)
        stack.callback(os.close, _lock_folder(folder))
        grace = timedelta(seconds=settings.delete_grace_seconds)
        catalog = Catalog(folder / "catalog.sqlite3", event_retention=settings.event_retention)
        stack.callback(catalog.close)
        catalog.adopt_compiler(f"{IMAGE_FORMATS}/{COMPILER_REVISION}")
        blobs = Blobs(folder)
        disk = DiskTier(folder / "images", settings.disk_cache_bytes)
        collector = Collector(catalog, blobs, disk, grace)
        collector.sweep()

        calls = _executor(stack, CALL_THREADS, "call")
        fetches = _executor(stack, settings.fetch_workers, "fetch")
        workers = Workers(settings.compile_workers, "compile")
        stack.callback(workers.close)
        builder = ImageBuilder(catalog, blobs, disk, metrics, grace)
        images = Images(builder, disk, workers, settings.memory_bytes)
        ahead = Ahead(catalog, images, calls, settings.compile_workers)
        stack.push_async_callback(ahead.close)
        registrar = _registrar(settings, catalog, blobs, metrics, stopping)
        watch = Watch(catalog, calls, settings.bookmark_seconds)
        registry = Registry(catalog, registrar, images, ahead, watch, metrics, calls, fetches)
        await registry.refresh_pinned()
        for layout_id in catalog.layout_ids():
            ahead.want_layout(layout_id)
        collecting = asyncio.create_task(
            _collect_for_ever(collector, images, calls, settings.collect_seconds)
        )
        stack.push_async_callback(_cancel, collecting)

        metrics.watch_samples(lambda: _samples(registry))
        host, port = split_address(settings.metrics_listen)
        http, metrics_port = metrics.serve(host, port)
        stack.callback(http.server_close)
        stack.callback(http.shutdown)
        server = grpc.aio.server(interceptors=[StatusInterceptor(metrics)], options=_OPTIONS)
        adapter_store_pb2_grpc.add_AdapterStoreServiceServicer_to_server(
            AdapterStoreServicer(registry), server
        )
        status = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        grpc_port = _bind(server, settings.listen)
        await server.start()
        await _set_health(status, health_pb2.HealthCheckResponse.SERVING)
        running = RunningStore(
            _with_port(settings.listen, grpc_port),
            _with_port(settings.metrics_listen, metrics_port),
            registry,
            images,
            ahead,
            catalog,
        )
        logger.info(
            "serving", extra={"grpc": running.grpc_address, "metrics": running.metrics_address}
        )
        try:
            yield running
        finally:
            await status.enter_graceful_shutdown()
            watch.close()
            await server.stop(settings.grace_seconds)
            stopping.set()  # nobody waits any more for what is still being fetched
            logger.info("stopped")


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT."""
    # Images compile side by side; each with all processors would only slow the others down.
    torch.set_num_threads(1)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_store(settings) as store:
        if settings.ready_file is not None:
            addresses = {"grpc": store.grpc_address, "metrics": store.metrics_address}
            write_atomically(settings.ready_file, json.dumps(addresses).encode())
        await stop.wait()
        logger.info("draining", extra={"grace_seconds": settings.grace_seconds})


def _registrar(
    settings: Settings,
    catalog: Catalog,
    blobs: Blobs,
    metrics: Metrics,
    stopping: threading.Event,
) -> Registrar:
    sources = Sources(
        {
            "file": LocalSource(settings.source_roots),
            "s3": S3Source(settings.s3_buckets, settings.s3_endpoint_url, settings.s3_region),
        }
    )
    return Registrar(
        catalog,
        blobs,
        sources,
        metrics,
        FetchLimits(settings.max_adapter_bytes, settings.max_file_bytes),
        CheckpointLimits(max_source_bytes=settings.max_adapter_bytes, max_rank=settings.max_rank),
        stopping,
    )


def _lock_folder(folder: Path) -> int:
    """Makes this the only process that uses the folder, until the descriptor is closed."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise PreconditionFailed(
            f"data_dir: another store is using {folder}", subject="data_dir"
        ) from exc
    return fd


def _executor(stack: AsyncExitStack, num_threads: int, name: str) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    stack.callback(executor.shutdown, wait=True, cancel_futures=True)
    return executor


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {address}") from exc


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


async def _set_health(status: health.aio.HealthServicer, value: int) -> None:
    for service in ("", SERVICE):
        await status.set(service, value)


async def _collect_for_ever(
    collector: Collector, images: Images, executor: ThreadPoolExecutor, seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(seconds)
        try:
            for digest in await loop.run_in_executor(executor, collector.collect):
                images.forget(digest)
        except Exception:
            logger.exception("collecting failed; it will be tried again")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _samples(registry: Registry) -> list[Sample]:
    status = registry.read_status()
    samples = [
        Sample("revision", "Newest catalog revision.", status.catalog.revision),
        Sample("adapters", "Names in the catalog.", status.catalog.adapters),
        Sample("layouts", "Registered layouts.", status.catalog.layouts),
        Sample("blob_bytes", "Size of the kept sources.", status.catalog.blob_bytes),
        Sample("active_pulls", "Pulls in progress.", status.active_pulls),
        Sample("watchers", "Watches in progress.", status.watchers),
    ]
    for tier, counts in (("memory", status.memory), ("disk", status.disk)):
        samples += [
            Sample("tier_capacity_bytes", "Capacity.", counts.capacity_bytes, {"tier": tier}),
            Sample("tier_used_bytes", "Bytes in the tier.", counts.used_bytes, {"tier": tier}),
            Sample("tier_images", "Images in the tier.", counts.images, {"tier": tier}),
            Sample("tier_hits_total", "Images found.", counts.hits, {"tier": tier}),
            Sample("tier_misses_total", "Images not found.", counts.misses, {"tier": tier}),
            Sample("tier_evictions_total", "Gone for room.", counts.evictions, {"tier": tier}),
        ]
    return samples
