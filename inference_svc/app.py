"""Wires the service, from settings to a running server: reads the model, builds the engine, serves,
drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from google.protobuf.json_format import MessageToJson

from contract.images.segment_kinds import FURTHER_KINDS
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import build_layout
from inference_svc.api.generate_call import checked_sampling
from inference_svc.api.grpc.servicer import InferenceServicer, call_rules
from inference_svc.api.load_report import load_report
from inference_svc.api.request_record import RequestLog
from inference_svc.api.service import AUDITED, ServerFacts, Service
from inference_svc.config import (
    InferenceSettings,
    Machine,
    ModelFacts,
    resolve,
    resolve_model,
    to_engine_config,
)
from inference_svc.core import (
    ANYONE,
    NO_DEFAULTS,
    ROLES,
    Action,
    SamplingDefaults,
    SamplingParams,
)
from inference_svc.debug import DebugInfo
from inference_svc.engine.memory_fit import fit_device
from inference_svc.engine.transport.messages import (
    LayoutAccepted,
    Repointed,
    StoreMessage,
    Superseded,
)
from inference_svc.engine.transport.process import END_S, EngineProcess
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import DeviceFull, EngineFailed, UnsupportedModel
from inference_svc.frontend.async_engine import AsyncEngine, EngineHandle
from inference_svc.frontend.watchdog import watch_engine
from inference_svc.host.cpus import usable_cpus
from inference_svc.host.device_faults import device_failure, engine_hung
from inference_svc.host.device_info import find_machine
from inference_svc.host.memory import resident_bytes
from inference_svc.metrics.engine import Snapshots
from inference_svc.metrics.fault_report import hold
from inference_svc.metrics.metrics import Metrics
from inference_svc.metrics.store import replica_metrics
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.generation_config import FILE_NAME, read_sampling_defaults
from inference_svc.model.checkpoint.headers import tower_modules
from inference_svc.model.description import Decoder
from inference_svc.results.logprobs import LogprobsMode
from inference_svc.store.client import ImageClient, ImageClientRecipe, NoStore
from inference_svc.store.convert import from_registration
from inference_svc.store.credentials import NO_ACCESS, StoreAccess, read_store_access
from inference_svc.store.directory import Directory, Servable
from inference_svc.store.replicas import Replicas
from inference_svc.store.texts import AdapterTexts
from inference_svc.store.types import Announcement, TextSource
from inference_svc.store.watch import StoreConnection
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.no_tokenizer import NoTokenizer
from inference_svc.text.prompt import PromptEncoder
from inference_svc.text.text_model import TextModel
from inference_svc.text.tokenizer import Tokenizer, tokenizer_bytes
from loadout.inference.v1 import inference_pb2
from loadout.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from servicekit import interpreter_gc
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile, parse_policy
from servicekit.errors import InvalidArgument
from servicekit.rpc.interceptor import CallInterceptor, TokenInterceptor, code_name
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
from servicekit.settings.load import unknown_variables
from servicekit.settings.types import split_address
from servicekit.shares import Shares
from servicekit.telemetry.metrics import Sample
from servicekit.telemetry.metrics_server import MetricsServer
from servicekit.telemetry.place_metrics import place_samples
from servicekit.telemetry.recent_errors import CallEnd, RecentErrors
from servicekit.telemetry.tracing import open_tracing
from servicekit.work_budget import WorkBudget

if TYPE_CHECKING:
    from inference_svc.api.http.serving.server import HttpServer

logger = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
SERVICE_NAME = "loadout-inference"
"""Names this service in traces."""
MIN_END_S = 2.0
"""The part of the grace in which calls are answered and the engine ends."""
FAILED_GRACE_S = 2.0
"""How long calls that come, or whose adapter is being resolved, are refused once the engine has
ended: grpc would end them without a reason."""
PACKAGES = ("loadout", "torch", "transformers", "grpcio")


async def serve(config: InferenceSettings) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises UnsupportedModel, or ValueError or OSError for settings that cannot be met; EngineFailed
    if the engine ends before, or the device fails: then after `fault_hold_seconds`.
    """
    stop = stop_on_signals()
    try:
        await _serve(config, stop)
    except (EngineFailed, DeviceFull) as error:
        failure = await asyncio.to_thread(device_failure, error)
        if failure is not None:
            await hold(failure, config.metrics_listen, config.fault_hold_seconds, stop)
        if failure is None or failure is error:
            raise
        raise failure from error


async def _serve(config: InferenceSettings, stop: asyncio.Event) -> None:
    decoder = load_description(config.model)
    machine = await asyncio.to_thread(find_machine, config)
    config = resolve_settings(config, machine, decoder)
    access = read_store_access(config)
    facts = _facts(config, decoder)
    server = InferenceServer(config, access)
    facts = replace(facts, metrics_port=split_address(server.metrics_address)[1])
    make_engine = _in_process if config.engine == "process" else _in_thread
    async with reloading(config, server.reloader):
        with make_engine(config, server.replicas, access) as load:
            try:
                text = await asyncio.to_thread(_load_tokenizer, config)
                engine = await asyncio.to_thread(load)
                speed, notes = engine.speed, machine.speed_notes + engine.speed.notes
                facts = replace(facts, num_threads=speed.num_threads, speed_notes=notes)
                await server.start(engine, text, facts)
                interpreter_gc.resume()
                await server.run(stop)
            finally:
                await server.close()


def _load_tokenizer(config: InferenceSettings) -> TextModel:
    return Tokenizer(config.model) if config.tokenizer else NoTokenizer()


def _adapter_texts(
    config: InferenceSettings, text: TextModel, catalog: TextSource | None, work: WorkBudget
) -> AdapterTexts | None:
    """Blocks: the model's tokenizer is hashed. Returns None where adapters' are not used."""
    if catalog is None or not isinstance(text, Tokenizer):
        return None
    return AdapterTexts(BaseTokenizer(text, config.model), catalog, work)


def describe_layout(config: InferenceSettings) -> str:
    """Returns the description of a server with these settings that it gives to the store: a
    RegisterLayoutRequest, as JSON. Raises InvalidSetting and UnsupportedModel."""
    decoder = load_description(config.model)
    config = resolve_model(config, _model_facts(decoder))
    dtype = getattr(torch, config.dtype)
    layout = build_layout(decoder, config.base_model_names[0], dtype)
    with hashing_base(config.model, decoder, usable_cpus()) as base:
        layout = layout.with_base(base())
    layout = layout.with_towers(tower_modules(config.model, decoder.wrapper))
    return MessageToJson(from_registration(layout, _announcement(config)), indent=None)


def _announcement(config: InferenceSettings) -> Announcement:
    """`config` is resolved."""
    return Announcement(
        config.base_model_names[1:],
        config.max_rank,
        config.lora_targets,
        FURTHER_KINDS,
        config.max_added_tokens,
    )


Load: TypeAlias = Callable[[], EngineThread | EngineProcess]
"""Blocks until the model is loaded, and returns the engine."""


@contextmanager
def _in_process(
    config: InferenceSettings, replicas: Replicas, access: StoreAccess
) -> Iterator[Load]:
    """The engine's process has a store client of its own, and loads the model at once."""
    # The process checks its memory budget before our tokenizer is loaded, so it gets the estimate.
    engine_config = replace(
        to_engine_config(config),
        frontend_bytes=resident_bytes(),
        tokenizer_bytes=tokenizer_bytes(config.model) if config.tokenizer else 0,
    )
    engine = EngineProcess(engine_config, ImageClientRecipe(config), replicas.on_update)
    replicas.publish_to(lambda update: engine.send(StoreMessage(update)))
    try:
        yield engine.load
    except BaseException:
        engine.stop(timeout_s=0)  # it may be reading gigabytes, for nothing
        raise
    engine.stop()


@contextmanager
def _in_thread(
    config: InferenceSettings, replicas: Replicas, access: StoreAccess
) -> Iterator[Load]:
    images = ImageClient(replicas, access) if config.store else NoStore()
    try:
        yield lambda: EngineThread(to_engine_config(config), images)
    finally:
        images.close()


def resolve_settings(
    config: InferenceSettings, machine: Machine, decoder: Decoder
) -> InferenceSettings:
    """Returns the settings with everything decided. Raises InvalidSetting for a setting that
    machine or model cannot fulfil, ValueError for memory that does not suffice."""
    fit = partial(fit_device, decoder=decoder)
    return resolve(config, machine, _model_facts(decoder), fit)


def _model_facts(decoder: Decoder) -> ModelFacts:
    layout = build_layout(decoder, "", torch.float32)
    return ModelFacts(
        dtype=decoder.dtype,
        max_position_embeddings=decoder.max_position_embeddings,
        kv_elements_per_token=decoder.kv_elements_per_token,
        lora_targets=layout.modules,
        fused_targets=layout.fused_modules,
        may_add_tokens=decoder.layer_inputs is None,
        expert_elements_per_rank=layout.expert_elements_per_rank,
    )


def _facts(config: InferenceSettings, decoder: Decoder) -> ServerFacts:
    return ServerFacts(
        base_model=config.base_model_names[0],
        aliases=config.base_model_names[1:],
        architecture=decoder.architecture,
        dtype=config.dtype,
        device=config.device,
        vocab_size=decoder.vocab_size,
        eos_token_ids=decoder.eos_token_ids,
        has_tokenizer=config.tokenizer,
        max_model_len=config.max_model_len,
        max_loras=config.max_loras,
        max_lora_rank=config.max_rank,
        lora_targets=config.lora_targets,
        max_sequences=config.max_sequences,
        max_batch_tokens=config.max_batch_tokens,
        max_queue=config.max_queue,
        versions={name: found for name in PACKAGES if (found := _version(name))},
        sampling=sampling_defaults(config, decoder.vocab_size),
        experts=decoder.expert_layers,
    )


def sampling_defaults(config: InferenceSettings, vocab_size: int) -> SamplingDefaults:
    """Returns the defaults of the model's folder, if they are to count, and the settings. Raises
    UnsupportedModel naming the file and the key that cannot be honoured."""
    mode = LogprobsMode(config.logprobs_mode)
    if config.generation_defaults == "none":
        return replace(NO_DEFAULTS, logprobs_mode=mode)
    try:
        found = read_sampling_defaults(config.model)
        checked_sampling(SamplingParams(**found.choice()), vocab_size)
    except (UnsupportedModel, InvalidArgument) as error:
        text = str(error)
        if isinstance(error, InvalidArgument):
            text = f"{config.model / FILE_NAME}: {text}"
        raise UnsupportedModel(f"{text}; --generation-defaults none does without") from None
    return replace(found, logprobs_mode=mode)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # run from a source tree that is not installed


# --- serving ------------------------------------------------------------------------------------


class Engine(EngineHandle, Protocol):
    @property
    def layout(self) -> ModelLayout: ...
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
        audit_log = logging.getLogger("inference_svc.audit")
        self._audit = Audit(
            *(config.audit_file, AuditEntry, AUDITED, audit_log), is_required=config.audit_required
        )
        self.reloader = Reloader(policies, certificates, self._audit)
        self._config = config
        self.replicas = Replicas.at(*config.store_addresses)
        self._store_access = store_access
        self._snapshots = Snapshots(config.max_loras)
        self._metrics = Metrics(config.max_loras, self._snapshots.read, config.metrics_adapters)
        if config.store:
            registry = self._metrics.registry
            registry.collect_families(lambda: replica_metrics(self.replicas))
        host, port = split_address(config.metrics_listen)
        self._metrics_server = MetricsServer(self._metrics.registry, host, port)
        self.metrics_address = with_port(config.metrics_listen, self._metrics_server.port)
        endpoint, ratio = config.otlp_endpoint, config.trace_sample_ratio
        self._tracing = open_tracing(
            endpoint, ratio, service=SERVICE_NAME, version=_version("loadout")
        )
        self._errors = RecentErrors()
        rules = call_rules(self._load, config.max_model_len)
        share = config.share
        self._places = CallPlaces(
            Shares("request_bytes", config.request_memory, share, setting="--request-memory"),
            Shares("answer_bytes", config.answer_memory, share, setting="--answer-memory"),
            share,
        )
        self._calls = CallInterceptor(rules, self._places, self._note_end, self._tracing)
        tokens = TokenInterceptor(self._authenticator, rules.domain, self._audit.refuse)
        self._grpc = RpcServer(
            *(SERVICE, config.listen, certificates, (self._calls, tokens), rules.requests),
            trailers=lambda: rules.trailers(None),
        )
        self.address = self._grpc.address
        self.http, self.http_address = _listen_http(config, certificates)
        self._is_serving = False
        self._end_s: float | None = None
        """When the grace ends, once it has begun."""
        self._engine_answers = True
        self._async_engine: AsyncEngine | None = None
        self._engine: Engine | None = None
        self._prompts: PromptEncoder | None = None
        self._texts: AdapterTexts | None = None
        self._store: StoreConnection | None = None
        self._metrics.registry.collect_samples(self._place_samples)
        self._metrics.registry.collect_samples(self.reloader.samples)
        self._metrics.registry.collect_samples(self._text_samples)

    async def start(self, engine: Engine, text: TextModel, facts: ServerFacts) -> None:
        """Starts the engine, the link to the store, and answering. The server stops the engine
        when it closes."""
        config = self._config
        self._engine = engine
        if config.store:
            self._store = StoreConnection(config.store_addresses, self.replicas, self._store_access)
        catalog = None if self._store is None else self._store.catalog
        servable = Servable(
            config.base_model_names,
            config.max_rank,
            config.lora_targets,
            engine.layout.modules,
            engine.layout.fused_modules,
        )
        directory = Directory(catalog, servable, config.name_ttl_seconds)
        self._async_engine = AsyncEngine(engine, text, self._places.answer_bytes)
        if self._tracing is not None:
            self._async_engine.on_spans = self._tracing.record_all
        directory.on_repointed = self._repointed
        directory.on_superseded = self._superseded
        directory.on_lookup = self._metrics.resolve_times.observe
        self._async_engine.start()
        self._prompts = PromptEncoder(
            *(text, facts.max_model_len, facts.vocab_size),
            *(self._places.request_work, config.share),
        )
        self._texts = await asyncio.to_thread(
            _adapter_texts, config, text, catalog, self._places.request_work
        )
        if self._store is not None:
            announcement = _announcement(config)
            self._store.start(directory, engine.layout, announcement, self._accept_layout)
        service = Service(
            facts,
            engine.layout,
            self._async_engine,
            directory,
            catalog,
            self._prompts,
            text,
            self._texts,
            self._places.request_bytes,
            self._places.request_work,
            RequestLog(self._metrics, code_name, log_prompts=config.log_prompts),
            self._authenticator,
            self._audit,
        )
        parts = (self._async_engine, directory, self._metrics, self.replicas, self._errors)
        servicer = InferenceServicer(service, DebugInfo(config, *parts))
        self._snapshots.attach(self._async_engine, directory)
        await self._grpc.start(partial(add_InferenceServiceServicer_to_server, servicer))
        if self.http is not None:
            await self._start_http(self.http, service)
        await self._set_serving(True)
        self._metrics.describe_server(facts.base_model, facts.dtype, facts.device, facts.versions)
        self._announce([*facts.speed_notes])

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains. Raises EngineFailed when the engine has ended."""
        assert self._async_engine is not None, "start comes before run"
        failed = self._async_engine.failed
        waits = [asyncio.create_task(event.wait()) for event in (stop, failed)]
        timeout_s, describe = self._config.step_timeout_seconds, self._async_engine.describe
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

    def _accept_layout(self, layout_id: str) -> None:
        assert self._async_engine is not None
        self._async_engine.send(LayoutAccepted(layout_id))

    def _repointed(self, old_digest: str, new_digest: str) -> None:
        assert self._async_engine is not None
        self._async_engine.send(Repointed(old_digest, new_digest))

    def _superseded(self, digest: str, is_superseded: bool) -> None:
        assert self._async_engine is not None
        self._async_engine.send(Superseded(digest, is_superseded))

    def _place_samples(self) -> Iterator[Sample]:
        places = [*self._places.shares]
        if self._prompts is not None:
            places.append(self._prompts.threads)
        if self.http is not None:
            places.append(self.http.connections)
        for place in places:
            yield from place_samples(place.use())

    def _text_samples(self) -> Iterator[Sample]:
        if self._texts is not None:
            yield from self._texts.samples()

    async def _set_serving(self, is_serving: bool) -> None:
        """Sets the answer of health checks, over gRPC and HTTP."""
        self._is_serving = is_serving
        self._grpc.set_serving(is_serving)

    async def _start_http(self, server: HttpServer, service: Service) -> None:
        from inference_svc.api.http.app import make_app

        answers = self._places.answer_bytes
        app = make_app(
            *(service, self._metrics, self._note_http_end, self._load, answers),
            is_serving=lambda: self._is_serving,
            opens_metrics=self._config.http_open_metrics,
            tracing=self._tracing,
        )
        await server.start(app)

    def _announce(self, warnings: list[str]) -> None:
        addresses = {"grpc": self.address, "metrics": self.metrics_address}
        if self.http is not None:
            addresses["http"] = self.http_address
        if self._config.log_prompts:
            warnings.append("--log-prompts is on: callers' prompts are written into this log")
            logger.warning(warnings[-1])
        warnings += unknown_variables(InferenceSettings)
        announce_ready(addresses, self._config.ready_file, warnings)


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
