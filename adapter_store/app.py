"""Serves a store, and drains it at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from adapter_store.api.servicer import (
    AUDITED,
    CALL_RULES,
    AdapterStoreServicer,
    StoreAuditEntry,
)
from adapter_store.blobs.volume import Volume
from adapter_store.build import Store, open_store, tenant_share
from adapter_store.config import StoreSettings
from adapter_store.core import Action
from adapter_store.debug import DebugInfo
from adapter_store.errors import CatalogUnavailable
from adapter_store.images.compile import use_one_thread_per_image
from adapter_store.images.plan.plan import COMPILER_REVISION
from adapter_store.service.status import StatusReader
from adapter_store.store_status import catalog_samples, volume_samples, work_samples
from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.adapter_store.v1.adapter_store_pb2_grpc import (
    add_AdapterStoreServiceServicer_to_server,
)
from servicekit import interpreter_gc
from servicekit.auth.audit import Audit
from servicekit.auth.authenticator import Authenticator
from servicekit.pace import Pace
from servicekit.rpc.interceptor import CallInterceptor, TokenInterceptor
from servicekit.rpc.places import CallPlaces
from servicekit.rpc.reload import Reloader, reloading
from servicekit.rpc.server import (
    RpcServer,
    announce_ready,
    stop_on_signals,
    with_port,
    withdraw_ready,
)
from servicekit.rpc.tls import CertificateFiles, check_exposure
from servicekit.settings.addresses import split_address
from servicekit.settings.load import unknown_variables
from servicekit.shares import Shares
from servicekit.telemetry.metrics import Sample
from servicekit.telemetry.metrics_server import MetricsServer
from servicekit.telemetry.place_metrics import place_samples
from servicekit.telemetry.recent_errors import CallEnd, RecentErrors
from servicekit.telemetry.tracing import open_tracing

logger = logging.getLogger(__name__)

_SERVICE = adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"]
SERVICE = _SERVICE.full_name
SERVICE_NAME = "loadout-store"
"""Names this service in traces."""
MAX_ANSWER_BYTES = 64 << 20  # a page of labelled adapters
OPTIONS = (("grpc.max_send_message_length", MAX_ANSWER_BYTES),)


@dataclass(frozen=True, slots=True)
class RunningStore:
    """Addresses are HOST:PORT with the real ports."""

    grpc_address: str
    metrics_address: str
    store: Store
    reloader: Reloader


async def serve(settings: StoreSettings) -> None:
    """Serves until SIGTERM or SIGINT."""
    use_one_thread_per_image()
    stop = stop_on_signals()
    async with running_store(settings) as running, reloading(settings, running.reloader):
        addresses = {"grpc": running.grpc_address, "metrics": running.metrics_address}
        announce_ready(addresses, settings.ready_file, unknown_variables(StoreSettings))
        interpreter_gc.resume()
        await stop.wait()
        logger.info("draining", extra={"grace_seconds": settings.grace_seconds})
    logger.info("stopped")


@asynccontextmanager
async def running_store(settings: StoreSettings) -> AsyncIterator[RunningStore]:
    """A store that serves while the context lasts. Leaving it drains: NOT_SERVING, no new calls,
    those in progress finish within the grace.

    Raises as `open_store`, `check_exposure`, `CertificateFiles` and `open_tracing`, and OSError if
    an address is taken.
    """
    check_exposure(settings, listen=settings.listen)
    async with AsyncExitStack() as stack:
        certificates = CertificateFiles(settings)
        audit = _audit(settings)
        stack.callback(audit.close)
        endpoint, ratio = settings.otlp_endpoint, settings.trace_sample_ratio
        tracing = open_tracing(endpoint, ratio, service=SERVICE_NAME, version=version("loadout"))
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        store = await stack.enter_async_context(open_store(settings))
        audit.make_room = store.volume.make_room
        # Not before: another store that runs on this folder keeps its own.
        withdraw_ready(settings.ready_file)
        places = _call_places(settings)
        stack.callback(places.close)
        metrics_address = stack.enter_context(_serving_metrics(store, settings, places))
        errors = RecentErrors()

        def note_end(end: CallEnd) -> None:
            store.metrics.count_call(end.method, end.code, end.reason, end.seconds)
            errors.add(end)

        calls = CallInterceptor(CALL_RULES, places, note_end, tracing)
        authenticator = Authenticator[Action](store.policies)
        tokens = TokenInterceptor(authenticator, CALL_RULES.domain, audit.refuse)
        server = RpcServer(
            SERVICE,
            settings.listen,
            certificates,
            (calls, tokens),
            CALL_RULES.requests,
            options=OPTIONS,
        )
        debug = DebugInfo(settings, store.use_cases.status, store.metrics, errors)
        reloader = Reloader(store.policies, certificates, audit)
        store.metrics.registry.collect_samples(reloader.samples)
        servicer = AdapterStoreServicer(
            store.use_cases, authenticator, audit, places.parsers_of, debug
        )
        await server.start(partial(add_AdapterStoreServiceServicer_to_server, servicer))
        server.set_serving(True)
        try:
            yield RunningStore(server.address, metrics_address, store, reloader)
        finally:
            server.announce_end()
            store.watch.close()
            await calls.drain(settings.grace_seconds)
            await server.close()


def _audit(settings: StoreSettings) -> Audit[StoreAuditEntry]:
    return Audit(
        settings.audit_file,
        StoreAuditEntry,
        AUDITED,
        logging.getLogger("adapter_store.audit"),
        is_required=settings.audit_required,
    )


def _call_places(settings: StoreSettings) -> CallPlaces:
    share = tenant_share(settings)
    return CallPlaces(
        Shares("request_bytes", settings.request_memory, share, setting="--request-memory"),
        Shares("answer_bytes", settings.answer_memory, share, setting="--answer-memory"),
        share,
        Pace(settings.min_transfer_rate, settings.pull_stall_seconds),
    )


@contextmanager
def _serving_metrics(store: Store, settings: StoreSettings, places: CallPlaces) -> Iterator[str]:
    address = settings.metrics_listen
    host, port = split_address(address)
    store.metrics.describe_store(version("loadout"), str(COMPILER_REVISION))
    store.metrics.expect_calls(_SERVICE.methods_by_name)
    registry = store.metrics.registry
    registry.collect_samples(lambda: _read_samples(store.use_cases.status, store.volume, places))
    with closing(MetricsServer(registry, host, port)) as server:
        yield with_port(address, server.port)


def _read_samples(status: StatusReader, volume: Volume, places: CallPlaces) -> list[Sample]:
    """Returns the samples, without the catalog's while its database does not answer: metrics must
    outlast an outage that they show."""
    found = [*work_samples(status.read_work()), *volume_samples(volume)]
    for place in places.shares:
        found += place_samples(place.use())
    with suppress(CatalogUnavailable):
        found += catalog_samples(status.read_catalog())
    return found
