"""The running server: listens, starts the parts in order, serves, drains, and closes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind
from inference_svc.adapters.layout import ModelLayout, head_modules
from inference_svc.api.access import AUDITED, Access
from inference_svc.api.grpc.servicer import InferenceServicer, call_rules
from inference_svc.api.load_report import load_report
from inference_svc.api.pictures import PictureReader
from inference_svc.api.request_record import RequestLog
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.auto_settings import picture_bytes
from inference_svc.config import InferenceSettings
from inference_svc.core import ANYONE, ROLES, Action
from inference_svc.debug import DebugInfo
from inference_svc.engine.transport.messages import LayoutAccepted, Repointed, Superseded
from inference_svc.engine.transport.process import END_S
from inference_svc.frontend.async_engine import AsyncEngine, EngineHandle
from inference_svc.frontend.watchdog import watch_engine
from inference_svc.grammars.checks import GrammarChecks
from inference_svc.grammars.vocabulary import make_vocabulary
from inference_svc.host.device_faults import engine_hung
from inference_svc.metrics.engine import Snapshots
from inference_svc.metrics.requests import Metrics
from inference_svc.metrics.store import replica_metrics
from inference_svc.pictures.fetching.hosts import parse_entries
from inference_svc.pictures.uploads import Uploads, room_for_uploads
from inference_svc.store.adapter_resolver import Directory, Servable
from inference_svc.store.credentials import NO_ACCESS, StoreAccess
from inference_svc.store.replicas import Replicas
from inference_svc.store.texts import AdapterTexts
from inference_svc.store.types import Announcement, Catalog, TextSource
from inference_svc.store.watch import StoreConnection
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.prompt import PromptEncoder
from inference_svc.text.text_model import TextModel
from inference_svc.text.tokenizer import Tokenizer
from loadout.inference.v1 import inference_pb2
from loadout.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile, parse_policy
from servicekit.rpc.interceptor import CallInterceptor, TokenInterceptor, code_name
from servicekit.rpc.places import CallPlaces
from servicekit.rpc.reload import Reloader
from servicekit.rpc.server import RpcServer, announce_ready, with_port, withdraw_ready
from servicekit.rpc.tls import CertificateFiles, check_exposure
from servicekit.settings.addresses import split_address
from servicekit.settings.load import unknown_variables
from servicekit.shares import Shares
from servicekit.telemetry.metrics import Sample
from servicekit.telemetry.metrics_server import MetricsServer
from servicekit.telemetry.place_metrics import place_samples
from servicekit.telemetry.recent_errors import CallEnd, RecentErrors
from servicekit.telemetry.tracing import open_tracing
from servicekit.work_budget import WorkBudget

if TYPE_CHECKING:
    from inference_svc.api.http.serving.server import HttpServer
    from inference_svc.pictures.fetching.fetcher import ImageFetcher

logger = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
SERVICE_NAME = "loadout-inference"
"""Names this service in traces."""
MIN_END_S = 2.0
"""The part of the grace in which calls are answered and the engine ends."""
FAILED_GRACE_S = 2.0
"""How long calls that come, or whose adapter is being resolved, are refused once the engine has
ended: grpc would end them without a reason."""


class Engine(EngineHandle, Protocol):
    @property
    def layout(self) -> ModelLayout: ...
    @property
    def other_layouts(self) -> tuple[ModelLayout, ...]:
        """The layouts of the other ranks, by rank."""

    def stop(self, timeout_s: float = END_S) -> None: ...
    def dump_stacks(self) -> None:
        """Writes to standard error where the engine is."""


class InferenceServer:
    """Listens from the start, so that a bad address shows before a model is loaded; answers from
    `start` to `close`. `config` is resolved.

    Raises InvalidSetting for a fault of policy, certificates or exposure, and OSError if it cannot
    listen or read a file. `reloader` is for `reloading`.
    """

    def __init__(self, config: InferenceSettings, store_access: StoreAccess = NO_ACCESS) -> None:
        check_exposure(config, listen=config.listen, http=config.http)
        withdraw_ready(config.ready_file)
        certificates = CertificateFiles(config)
        policies = PolicyFile(config.policy_file, _parse_policy, Policy(anyone=ANYONE))
        self._authenticator = Authenticator[Action](policies)
        self._audit = _open_audit(config)
        self.reloader = Reloader(policies, certificates, self._audit)
        self._config = config
        self.replicas = Replicas.at(*config.store_addresses)
        self._store_access = store_access
        self._snapshots = Snapshots(config.max_loras)
        self._metrics = self._make_metrics()
        host, port = split_address(config.metrics_listen)
        self._metrics_server = MetricsServer(self._metrics.registry, host, port)
        self.metrics_address = with_port(config.metrics_listen, self._metrics_server.port)
        self._tracing = open_tracing(
            config.otlp_endpoint,
            config.trace_sample_ratio,
            service=SERVICE_NAME,
            version=installed_version("loadout"),
        )
        self._errors = RecentErrors()
        self._places = _call_places(config)
        self._fetcher = _open_fetcher(config, self._places, self._metrics)
        rules = call_rules(self._load, config.max_model_len)
        self._calls = CallInterceptor(rules, self._places, self._note_end, self._tracing)
        tokens = TokenInterceptor(self._authenticator, rules.domain, self._audit.refuse)
        self._grpc = RpcServer(
            SERVICE,
            config.listen,
            certificates,
            (self._calls, tokens),
            rules.requests,
            trailers=lambda: rules.trailers(None),
        )
        self.address = self._grpc.address
        self.http, self.http_address = _listen_http(config, certificates)
        self._is_serving, self._engine_answers = False, True
        self._end_s: float | None = None  # when the grace ends, once it has begun
        self._async_engine: AsyncEngine | None = None
        self._engine: Engine | None = None
        self._prompts: PromptEncoder | None = None
        self._texts: AdapterTexts | None = None
        self._grammars: GrammarChecks | None = None
        self._pictures: PictureReader | None = None
        self._store: StoreConnection | None = None
        # Last, because a scrape may come at once.
        for samples in (self._place_samples, self.reloader.samples, self._made_samples):
            self._metrics.registry.collect_samples(samples)

    def _make_metrics(self) -> Metrics:
        config = self._config
        metrics = Metrics(config.max_loras, self._snapshots.read, config.metrics_adapters)
        if config.store:
            metrics.registry.collect_families(lambda: replica_metrics(self.replicas))
        return metrics

    async def start(self, engine: Engine, text: TextModel, facts: ServerFacts) -> None:
        """Starts the engine, the link to the store, and answering. The server stops the engine
        when it closes."""
        config, self._engine = self._config, engine
        if config.store:
            self._store = StoreConnection(config.store_addresses, self.replicas, self._store_access)
        catalog = None if self._store is None else self._store.catalog
        directory = self._open_directory(catalog, engine.layout)
        self._async_engine = AsyncEngine(engine, text, self._places.answer_bytes)
        if self._tracing is not None:
            self._async_engine.on_spans = self._tracing.record_all
        self._async_engine.start()
        self._prompts = self._open_prompts(text, facts)
        self._pictures = self._open_pictures(facts)
        self._grammars = self._open_grammars(text, facts)
        self._texts = await asyncio.to_thread(
            _adapter_texts, config, text, catalog, self._places.request_work
        )
        if self._store is not None:
            announced = announcement_of(config, facts.weight_form)
            layouts = (engine.layout, *engine.other_layouts)
            self._store.start(directory, layouts, announced, self._accept_layouts)
        service = Service(
            facts=facts,
            layout=engine.layout,
            engine=self._async_engine,
            directory=directory,
            registry=catalog,
            prompts=self._prompts,
            text=text,
            texts=self._texts,
            reading=self._places.request_bytes,
            work=self._places.request_work,
            request_log=RequestLog(self._metrics, code_name, log_prompts=config.log_prompts),
            access=Access(self._authenticator, self._audit),
            grammars=self._grammars,
            pictures=self._pictures,
        )
        parts = (self._async_engine, directory, self._metrics, self.replicas, self._errors)
        servicer = InferenceServicer(service, DebugInfo(config, *parts))
        self._snapshots.attach(self._async_engine, directory)
        await self._grpc.start(partial(add_InferenceServiceServicer_to_server, servicer))
        if self.http is not None:
            await self._start_http(self.http, service)
        await self._set_serving(True)
        self._metrics.describe_server(facts.base_model, facts.dtype, facts.device, facts.versions)
        self._metrics.describe_weights(facts.weight_formats)
        self._announce(facts)

    def _open_prompts(self, text: TextModel, facts: ServerFacts) -> PromptEncoder:
        work, share = self._places.request_work, self._config.share
        sizes = facts.max_model_len, facts.vocab_size
        return PromptEncoder(text, *sizes, work, share, facts.pictures, facts.placeholder_ids)

    def _open_pictures(self, facts: ServerFacts) -> PictureReader:
        size, share = picture_bytes(self._config), self._config.share
        pixels = Shares("prompt_image_bytes", size, share, setting="--prompt-image-memory")
        uploads = Uploads("prompt_image_uploads", room_for_uploads(size), share)
        return PictureReader(facts.pictures, facts.base_model, pixels, uploads, self._fetcher)

    def _open_grammars(self, text: TextModel, facts: ServerFacts) -> GrammarChecks:
        vocabulary = partial(make_vocabulary, text.pieces, facts.vocab_size, facts.eos_token_ids)
        return GrammarChecks(vocabulary, self._places.request_work)

    def _open_directory(self, catalog: Catalog | None, layout: ModelLayout) -> Directory:
        config = self._config
        directory = Directory(catalog, _servable(config, layout), config.name_ttl_seconds)
        directory.on_repointed = self._repointed
        directory.on_superseded = self._superseded
        directory.on_lookup = self._metrics.resolve_times.observe
        return directory

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains. Raises EngineFailed when the engine has ended."""
        assert self._async_engine is not None, "start comes before run"
        failed = self._async_engine.failed
        waits = [asyncio.create_task(event.wait()) for event in (stop, failed)]
        timeout_s, describe = self._config.step_timeout_seconds, self._async_engine.calls.describe
        watching = asyncio.create_task(
            watch_engine(describe, self._set_answering, self._end_hung, timeout_s)
        )
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, watching):
            task.cancel()
        self._is_serving = False
        self._grpc.announce_end()
        failure = self._async_engine.failure
        if failure is not None and failure.fault is not None:
            self._metrics.count_fault(failure.fault)
        if self._store is not None:
            await self._store.leave()
        grace_seconds = self._config.grace_seconds
        left_seconds = min(FAILED_GRACE_S, grace_seconds)
        if not failed.is_set():
            logger.info("draining", extra={"grace_seconds": grace_seconds})
            self._end_s = time.monotonic() + grace_seconds
            self._engine_answers = await self._async_engine.drain(grace_seconds)
            if not self._engine_answers:
                logger.error("the engine does not answer: ending without it")
                self._end_s = time.monotonic()
            left_seconds = self._end_s - time.monotonic()
        # In addition to requests: operators' calls, and calls whose adapter is being resolved.
        drains = [self._calls.drain(left_seconds)]
        if self.http is not None:
            drains.append(self.http.drain(left_seconds))
        await asyncio.gather(*drains)
        if self._async_engine.failure is not None:
            raise self._async_engine.failure

    async def _set_answering(self, answers: bool) -> None:
        await self._set_serving(answers)
        if not answers and self._engine is not None:
            self._engine.dump_stacks()

    def _end_hung(self) -> None:
        """Gives up an engine that hangs: `close` kills it."""
        assert self._async_engine is not None
        self._engine_answers = False
        self._async_engine.fail(engine_hung(self._config.step_timeout_seconds))

    async def close(self) -> None:
        """Frees everything, in the reverse order of use. Also after a start that failed."""
        fronts = [self._grpc.close()]
        if self.http is not None:
            fronts.append(self.http.close())
        await asyncio.gather(*fronts)
        self._snapshots.detach()
        if self._store is not None:
            await self._store.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop, self._engine_seconds())
        if self._prompts is not None:
            self._prompts.close()
        if self._texts is not None:
            self._texts.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._pictures is not None:
            self._pictures.close()
        self._places.close()
        await asyncio.to_thread(self._metrics_server.close)
        self._audit.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _engine_seconds(self) -> float:
        """Returns how long the engine may take to end."""
        if not self._engine_answers:
            return 0.0
        if self._end_s is None:
            return END_S
        return max(MIN_END_S, self._end_s - time.monotonic() - MIN_END_S)

    def _load(self) -> str:
        """Returns the load report that is sent with every answer."""
        num_requests = 0 if self._async_engine is None else self._async_engine.num_requests
        return load_report(num_requests, self._config.max_sequences, self._config.max_queue)

    def _note_end(self, end: CallEnd) -> None:
        self._metrics.count_rpc(end.method, end.code, end.reason)
        self._errors.add(end)

    def _note_http_end(self, end: CallEnd) -> None:
        self._metrics.count_http(end.method, end.code, end.reason)
        self._errors.add(end)

    def _accept_layouts(self, layout_id: str, others: tuple[str, ...]) -> None:
        assert self._async_engine is not None
        self._async_engine.send(LayoutAccepted(layout_id, others))

    def _repointed(self, old_digest: str, new_digest: str) -> None:
        assert self._async_engine is not None
        self._async_engine.send(Repointed(old_digest, new_digest))

    def _superseded(self, digest: str, is_superseded: bool) -> None:
        assert self._async_engine is not None
        self._async_engine.send(Superseded(digest, is_superseded))

    def _place_samples(self) -> Iterator[Sample]:
        places: list[Shares | Uploads] = [*self._places.shares]
        if self._prompts is not None:
            places.append(self._prompts.threads)
        if self._pictures is not None:
            places += self._pictures.places
        if self.http is not None:
            places.append(self.http.connections)
        for place in places:
            yield from place_samples(place.use())

    def _made_samples(self) -> Iterator[Sample]:
        if self._texts is not None:
            yield from self._texts.samples()
        if self._grammars is not None:
            yield from self._grammars.samples()

    async def _set_serving(self, is_serving: bool) -> None:
        """Sets the answer of health checks, over gRPC and HTTP."""
        self._is_serving = is_serving
        self._grpc.set_serving(is_serving)

    async def _start_http(self, server: HttpServer, service: Service) -> None:
        from inference_svc.api.http.app import make_app

        answers = self._places.answer_bytes
        app = make_app(
            service,
            self._metrics,
            self._note_http_end,
            self._load,
            answers,
            is_serving=lambda: self._is_serving,
            opens_metrics=self._config.http_open_metrics,
            tracing=self._tracing,
        )
        await server.start(app)

    def _announce(self, facts: ServerFacts) -> None:
        warnings = [*facts.speed_notes]
        addresses = {"grpc": self.address, "metrics": self.metrics_address}
        if self.http is not None:
            addresses["http"] = self.http_address
        if self._config.log_prompts:
            warnings.append("--log-prompts is on: callers' prompts are written into this log")
            logger.warning(warnings[-1])
        if self._fetcher is not None and facts.pictures is None:
            warnings.append("--image-hosts has no effect: the model reads no images here")
            logger.warning(warnings[-1])
        warnings += unknown_variables(InferenceSettings)
        announce_ready(addresses, self._config.ready_file, warnings)


def _adapter_texts(
    config: InferenceSettings, text: TextModel, catalog: TextSource | None, work: WorkBudget
) -> AdapterTexts | None:
    """Blocks: the model's tokenizer is hashed. Returns None where adapters' are not used."""
    if catalog is None or not isinstance(text, Tokenizer):
        return None
    return AdapterTexts(BaseTokenizer(text, config.model), catalog, work)


def announcement_of(config: InferenceSettings, weight_form: str) -> Announcement:
    """`config` is resolved."""
    # The norms of outputs would be of sums of A and B that no rank has.
    refused = (SegmentKind.MAGNITUDE,) if config.fully_sharded_loras else ()
    return Announcement(
        config.base_model_names[1:],
        config.max_rank,
        config.lora_targets,
        tuple(each for each in FURTHER_KINDS if each not in refused),
        config.max_added_tokens,
        weight_form,
        config.num_ranks if config.num_ranks > 1 else 0,
    )


def _open_audit(config: InferenceSettings) -> Audit[AuditEntry]:
    return Audit(
        config.audit_file,
        AuditEntry,
        AUDITED,
        logging.getLogger("inference_svc.audit"),
        is_required=config.audit_required,
    )


def _call_places(config: InferenceSettings) -> CallPlaces:
    share = config.share
    return CallPlaces(
        Shares("request_bytes", config.request_memory, share, setting="--request-memory"),
        Shares("answer_bytes", config.answer_memory, share, setting="--answer-memory"),
        share,
    )


def _open_fetcher(
    config: InferenceSettings, places: CallPlaces, metrics: Metrics
) -> ImageFetcher | None:
    """Returns None if no host is allowed. Raises like `make_context`."""
    if not config.image_hosts:
        return None
    # Its libraries are the HTTP server's.
    from inference_svc.pictures.fetching.exchange import Outcome
    from inference_svc.pictures.fetching.fetcher import NUM_FETCHES, ImageFetcher, make_context

    for each in Outcome:
        metrics.count_fetch(each.value, 0)  # so that the first failure is an increase, too
    return ImageFetcher(
        parse_entries(config.image_hosts),
        make_context(config.image_tls_ca_file),
        Shares("prompt_image_fetches", NUM_FETCHES, config.share),
        places.request_bytes,
        lambda outcome: metrics.count_fetch(outcome.value),
        f"loadout/{installed_version('loadout')}",
    )


def _servable(config: InferenceSettings, layout: ModelLayout) -> Servable:
    return Servable(
        config.base_model_names,
        config.max_rank,
        config.lora_targets,
        layout.modules,
        layout.fused_modules,
        head_modules(layout),
    )


def _parse_policy(text: str) -> Policy[Action]:
    return parse_policy(text, ROLES)


def _listen_http(
    config: InferenceSettings, certificates: CertificateFiles
) -> tuple[HttpServer | None, str]:
    """Returns None, "" without an address."""
    address = config.http
    if not address:
        return None, ""
    # Its libraries are loaded where it is needed only.
    from inference_svc.api.http.serving.server import HttpServer

    server = HttpServer(address, certificates, config.share)
    return server, with_port(address, server.port)


def installed_version(package: str) -> str:
    """Returns "" if it runs from a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
