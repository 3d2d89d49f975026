"""Serves the store: gRPC with health and reflection, metrics over HTTP, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from adapter_store.api.servicer import AUDITED, AdapterStoreServicer
from adapter_store.api.status import StatusInterceptor, TokenGuard
from adapter_store.app import Store, open_store
from adapter_store.blobs.fsync import write_atomically
from adapter_store.config import StoreSettings
from adapter_store.core import Action, StoreAuditEntry
from adapter_store.debug import DebugInfo
from adapter_store.errors import CatalogUnavailable
from adapter_store.images.plan import COMPILER_REVISION
from adapter_store.reload import Reload
from adapter_store.service import StoreService
from adapter_store.store_status import catalog_samples, volume_samples, work_samples
from adapter_store.tls import CertificateFiles, Certificates, check_exposure
from loadout.adapter_store.v1 import adapter_store_pb2, adapter_store_pb2_grpc
from servicekit.auth.audit import Audit
from servicekit.auth.authenticator import Authenticator
from servicekit.errors import FailedPrecondition
from servicekit.settings import split_address
from servicekit.telemetry.metrics import Sample
from servicekit.telemetry.metrics_server import MetricsServer
from servicekit.telemetry.recent_errors import RecentErrors
from servicekit.telemetry.tracing import Tracing, open_tracing

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger("adapter_store.audit")

_SERVICE = adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"]
SERVICE = _SERVICE.full_name
SERVICE_NAME = "loadout-store"
"""Names this service in traces."""
MAX_MESSAGE_BYTES = 64 << 20  # the layout of a large model; a page of labelled adapters
ANSWER_SECONDS = 0.5  # for the last answers to leave

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second store on the port is an error, not a lottery
    # Streams are long and may be silent; a peer that is gone must not hold an image.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class RunningStore:
    """Addresses are HOST:PORT with the real ports."""

    grpc_address: str
    metrics_address: str
    store: Store
    reload: Reload


async def serve(settings: StoreSettings) -> None:
    """Serves until SIGTERM or SIGINT. SIGHUP: see Reload."""
    # Images compile side by side; each with all processors would only slow the others down.
    torch.set_num_threads(1)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_store(settings) as running:
        addresses = {"grpc": running.grpc_address, "metrics": running.metrics_address}
        if settings.policy_file or settings.tls_cert_file or settings.audit_file:
            # Else a terminal that closes ends the store, as ever.
            loop.add_signal_handler(signal.SIGHUP, running.reload)
        logger.info("serving", extra=addresses)
        if settings.ready_file is not None:
            write_atomically(settings.ready_file, json.dumps(addresses).encode())
        await stop.wait()
        logger.info("draining", extra={"grace_seconds": settings.grace_seconds})
    logger.info("stopped")


@asynccontextmanager
async def running_store(settings: StoreSettings) -> AsyncIterator[RunningStore]:
    """A store that serves while the context lasts. Leaving it drains: NOT_SERVING, no new calls,
    those in progress finish within the grace.

    Raises as `open_store`, `check_exposure` and `read_certificates`, and OSError if an address is
    taken.
    """
    check_exposure(settings)
    async with AsyncExitStack() as stack:
        certificates = CertificateFiles(settings)
        audit = stack.enter_context(
            closing(Audit(settings.audit_file, StoreAuditEntry, AUDITED, audit_logger))
        )
        tracing = _open_tracing(settings)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        store = await stack.enter_async_context(open_store(settings))
        store.metrics.describe_store(version("loadout"), str(COMPILER_REVISION))
        store.metrics.expect_calls(_SERVICE.methods_by_name)
        metrics_address = stack.enter_context(_serving_metrics(store, settings))
        errors = RecentErrors()
        calls = StatusInterceptor(store.metrics, errors, tracing)
        authenticator = Authenticator[Action](store.policies)
        # Outermost what counts and drains.
        interceptors = [calls, TokenGuard(authenticator, audit.refuse)]
        server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
        debug = DebugInfo(settings, store.service, store.metrics, errors)
        servicer = AdapterStoreServicer(
            store.service, authenticator, audit, settings.pull_stall_seconds, debug
        )
        adapter_store_pb2_grpc.add_AdapterStoreServiceServicer_to_server(servicer, server)
        status = _add_health_and_reflection(server)
        grpc_address = _bind(server, settings.listen, certificates)
        await server.start()
        for service in ("", SERVICE):
            await status.set(service, health_pb2.HealthCheckResponse.SERVING)
        try:
            reload = Reload(store.policies, certificates, audit)
            yield RunningStore(grpc_address, metrics_address, store, reload)
        finally:
            await status.enter_graceful_shutdown()
            store.watch.close()
            await calls.drain(settings.grace_seconds)
            await server.stop(ANSWER_SECONDS)


def _open_tracing(settings: StoreSettings) -> Tracing | None:
    """Raises FailedPrecondition."""
    endpoint, ratio = settings.otlp_endpoint, settings.trace_sample_ratio
    try:
        return open_tracing(endpoint, ratio, service=SERVICE_NAME, version=version("loadout"))
    except ValueError as error:
        raise FailedPrecondition(str(error), subject="otlp_endpoint") from error


@contextmanager
def _serving_metrics(store: Store, settings: StoreSettings) -> Iterator[str]:
    address = settings.metrics_listen
    host, port = split_address(address)
    registry = store.metrics.registry
    registry.collect_samples(lambda: _read_samples(store.service, settings.data_dir))
    with closing(MetricsServer(registry, host, port)) as server:
        yield _with_port(address, server.port)


def _read_samples(service: StoreService, data_dir: Path) -> list[Sample]:
    """Without the catalog's while its database does not answer: what tells of an outage must
    outlast it."""
    found = [*work_samples(service.read_work()), *volume_samples(data_dir)]
    with suppress(CatalogUnavailable):
        found += catalog_samples(service.read_catalog())
    return found


def _add_health_and_reflection(server: grpc.aio.Server) -> health.aio.HealthServicer:
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return status


def _bind(server: grpc.aio.Server, address: str, certificates: CertificateFiles) -> str:
    credentials = _credentials(certificates)
    try:
        if credentials is None:
            return _with_port(address, server.add_insecure_port(address))
        return _with_port(address, server.add_secure_port(address, credentials))
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {address}") from exc


def _credentials(files: CertificateFiles) -> grpc.ServerCredentials | None:
    """Ask for the certificates in force at each handshake: a new one needs no restart."""
    used = files.current
    if used is None:
        return None

    def renew() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if files.current is used or files.current is None:
            return None
        used = files.current
        return _configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renew, require_client_authentication=used.client_ca is not None
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
