"""Wires the transport around an engine, and runs it from ready to drained."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_svc.adapters.layout import ModelLayout
from inference_svc.api.grpc.servicer import InferenceServicer
from inference_svc.api.grpc.status import Health, StatusInterceptor, TokenGuard, code_of
from inference_svc.api.load_report import load_report
from inference_svc.api.request_record import RequestLog
from inference_svc.api.service import AUDITED, ServerFacts, Service
from inference_svc.config import InferenceSettings
from inference_svc.core import ANYONE, ROLES, Action
from inference_svc.debug import DebugInfo
from inference_svc.engine.messages import LayoutAccepted, Repointed
from inference_svc.frontend.async_engine import EngineHandle, Frontend
from inference_svc.frontend.watchdog import watch_engine
from inference_svc.metrics.engine import Snapshots
from inference_svc.metrics.metrics import Metrics
from inference_svc.metrics.store import replica_metrics
from inference_svc.reload import Reload
from inference_svc.store.credentials import NO_ACCESS, StoreAccess
from inference_svc.store.directory import Directory, Servable
from inference_svc.store.replicas import Replicas
from inference_svc.store.watch import StoreConnection
from inference_svc.text.detokenizer import Decoder
from inference_svc.text.pieces import Vocabulary
from inference_svc.text.prompt import Encoder, PromptEncoder
from inference_svc.tls import CertificateFiles, Certificates, check_exposure
from loadout.inference.v1 import inference_pb2, inference_pb2_grpc
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile, parse_policy
from servicekit.errors import ServiceError
from servicekit.settings import split_address
from servicekit.telemetry.metrics_server import MetricsServer
from servicekit.telemetry.recent_errors import CallEnd, RecentErrors
from servicekit.telemetry.tracing import open_tracing

if TYPE_CHECKING:
    from inference_svc.api.http.server import HttpServer

log = logging.getLogger(__name__)
audit_log = logging.getLogger("inference_svc.audit")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
SERVICE_NAME = "loadout-inference"
"""Names this service in traces."""
ANSWER_SECONDS = 1.0
"""For statuses to reach their callers before connections are closed."""

SERVER_OPTIONS = (
    # Two servers on one port would each get some of the calls.
    ("grpc.so_reuseport", 0),
    # Clients that keep their connections alive are welcome.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Engine(EngineHandle, Protocol):
    @property
    def layout(self) -> ModelLayout: ...
    def stop(self) -> None: ...


class TextModel(Encoder, Decoder, Vocabulary, Protocol):
    """Both directions of a tokenizer, and its tokens one by one."""


class InferenceServer:
    """Listens from the start, so that a bad address shows before a model is loaded; answers from
    `start` to `close`. `config` is resolved.

    Raises InvalidSetting for what is wrong with policy, certificates or exposure, and OSError if
    it cannot listen or read a file. `reload` is for SIGHUP, on the event loop.
    """

    def __init__(self, config: InferenceSettings, store_access: StoreAccess = NO_ACCESS) -> None:
        check_exposure(config)
        certificates = CertificateFiles(config)
        policies = PolicyFile(config.policy_file, _parse_policy, Policy(anyone=ANYONE))
        self._authenticator = Authenticator[Action](policies)
        self._audit = Audit(config.audit_file, AuditEntry, AUDITED, audit_log)
        self.reload = Reload(policies, certificates, self._audit)
        self._config = config
        self.replicas = Replicas.at(*config.store_addresses)
        self._store_access = store_access
        if config.ready_file is not None:
            config.ready_file.unlink(missing_ok=True)
        self._snapshots = Snapshots(config.max_loras)
        self._metrics = Metrics(config.max_loras, self._snapshots.read, config.metrics_adapters)
        if config.store:
            registry = self._metrics.registry
            registry.collect_families(lambda: replica_metrics(self.replicas))
        host, port = split_address(config.metrics_listen)
        self._metrics_server = MetricsServer(self._metrics.registry, host, port)
        self.metrics_address = _join(host, self._metrics_server.port)
        self._health = Health(self._load)
        endpoint, ratio = config.otlp_endpoint, config.trace_sample_ratio
        self._tracing = open_tracing(
            endpoint, ratio, service=SERVICE_NAME, version=version("loadout")
        )
        self._errors = RecentErrors()
        self._calls = StatusInterceptor(self._note_end, self._load, self._tracing)
        interceptors = [TokenGuard(self._authenticator, self._note_refusal), self._calls]
        self._grpc = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self.address = _listen(self._grpc, config.listen, certificates)
        self._http, self.http_address = _listen_http(config.http, certificates)
        self._is_serving = False
        self._frontend: Frontend | None = None
        self._engine: Engine | None = None
        self._prompts: PromptEncoder | None = None
        self._store: StoreConnection | None = None

    async def start(self, engine: Engine, text: TextModel, facts: ServerFacts) -> None:
        """Starts the engine, the link to the store, and answering. The server stops the engine
        when it closes."""
        config = self._config
        self._engine = engine
        if config.store:
            self._store = StoreConnection(config.store_addresses, self.replicas, self._store_access)
        catalog = None if self._store is None else self._store.catalog
        servable = Servable(config.base_model_names, config.max_lora_rank)
        directory = Directory(catalog, servable, config.name_ttl_seconds)
        self._frontend = Frontend(engine, text)
        if self._tracing is not None:
            self._frontend.on_spans = self._tracing.record_all
        directory.on_repointed = self._repointed
        directory.on_lookup = self._metrics.resolve_times.observe
        self._frontend.start()
        self._prompts = PromptEncoder(text, facts.max_model_len, facts.vocab_size)
        if self._store is not None:
            self._store.start(directory, engine.layout, self._accept_layout)
        service = Service(
            facts,
            self._frontend,
            directory,
            catalog,
            self._prompts,
            RequestLog(self._metrics, code_of, log_prompts=config.log_prompts),
            self._authenticator,
            self._audit,
        )
        parts = (self._frontend, directory, self._metrics, self.replicas, self._errors)
        servicer = InferenceServicer(service, DebugInfo(config, *parts))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self._snapshots.attach(self._frontend, directory)
        await self._grpc.start()
        if self._http is not None:
            await self._start_http(self._http, service, text)
        await self._set_serving(True)
        self._metrics.describe_server(facts.base_model, facts.dtype, facts.device, facts.versions)
        self._announce()

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop`, then drains; the process's exit status. An engine that fails ends
        it with 1."""
        assert self._frontend is not None, "start comes before run"
        failed = self._frontend.failed
        waits = [asyncio.create_task(event.wait()) for event in (stop, failed)]
        watching = asyncio.create_task(watch_engine(self._frontend.describe, self._set_serving))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, watching):
            task.cancel()
        self._is_serving = False
        await self._health.enter_graceful_shutdown()
        if not failed.is_set():
            grace_seconds = self._config.grace_seconds
            log.info("draining", extra={"grace_seconds": grace_seconds})
            start = time.monotonic()
            await self._frontend.drain(grace_seconds)
            # Besides requests: what operators have asked for, and what still asks for a name.
            left_seconds = grace_seconds - (time.monotonic() - start)
            drains = [self._calls.drain(left_seconds)]
            if self._http is not None:
                drains.append(self._http.drain(left_seconds))
            await asyncio.gather(*drains)
        if failed.is_set():
            log.error("the engine failed: ending")
        return int(failed.is_set())

    async def close(self) -> None:
        """Frees everything, in the reverse order of use. Also after a start that failed."""
        if self._http is not None:
            await self._http.close()
        await self._grpc.stop(ANSWER_SECONDS)
        self._snapshots.detach()
        if self._store is not None:
            await self._store.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        if self._prompts is not None:
            self._prompts.close()
        await asyncio.to_thread(self._metrics_server.close)
        self._audit.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _load(self) -> str:
        """Told with every answer."""
        num_requests = 0 if self._frontend is None else self._frontend.num_requests
        return load_report(num_requests, self._config.max_sequences, self._config.max_queue)

    def _note_end(self, end: CallEnd) -> None:
        self._metrics.count_rpc(end.method, end.code, end.reason)
        self._note_error(end)

    def _note_error(self, end: CallEnd) -> None:
        if end.reason:
            self._errors.add(asdict(end))

    def _note_http_end(self, end: CallEnd) -> None:
        self._metrics.count_http(end.method, end.code, end.reason)
        self._note_error(end)

    def _note_refusal(self, method: str, peer: str, error: ServiceError) -> None:
        """Of a call of which nothing was read."""
        facts = {"method": method, "peer": peer, "reason": error.reason}
        log.info("call refused", extra=facts)
        self._note_end(CallEnd.of(method, "UNAUTHENTICATED", error))
        self._audit.refuse(method, peer, error)

    def _accept_layout(self, layout_id: str) -> None:
        assert self._frontend is not None
        self._frontend.send(LayoutAccepted(layout_id))

    def _repointed(self, old_digest: str, new_digest: str) -> None:
        assert self._frontend is not None
        self._frontend.send(Repointed(old_digest, new_digest))

    async def _set_serving(self, is_serving: bool) -> None:
        """For who checks health, over gRPC and HTTP."""
        self._is_serving = is_serving
        answers = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, answers.SERVING if is_serving else answers.NOT_SERVING)

    async def _start_http(self, server: HttpServer, service: Service, text: TextModel) -> None:
        from inference_svc.api.http.app import make_app

        app = make_app(
            *(service, text, self._metrics, self._note_http_end, self._load),
            is_serving=lambda: self._is_serving,
            opens_metrics=self._config.http_open_metrics,
            tracing=self._tracing,
        )
        await server.start(app)

    def _announce(self) -> None:
        addresses = {"grpc": self.address, "metrics": self.metrics_address}
        if self._http is not None:
            addresses["http"] = self.http_address
        log.info("serving", extra=addresses)
        if self._config.log_prompts:
            log.warning("log_prompts is on: what callers ask is written into this log")
        path = self._config.ready_file
        if path is None:
            return
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(addresses))
        partial.replace(path)


def _parse_policy(text: str) -> Policy[Action]:
    return parse_policy(text, ROLES)


def _listen(server: grpc.aio.Server, address: str, certificates: CertificateFiles) -> str:
    credentials = _credentials(certificates)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    return _join(split_address(address)[0], port)


def _listen_http(address: str, certificates: CertificateFiles) -> tuple[HttpServer | None, str]:
    """None, "": it is not wanted."""
    if not address:
        return None, ""
    # Who does not want it does not load what it is made of.
    from inference_svc.api.http.server import HttpServer

    server = HttpServer(address, certificates)
    return server, _join(split_address(address)[0], server.port)


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


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
