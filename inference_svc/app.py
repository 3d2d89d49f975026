"""The service from settings to its end: reads the model, decides settings, makes the engine and the
server, and serves until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from google.protobuf.json_format import MessageToJson

from inference_svc.adapters.picture_targets import with_unread
from inference_svc.adapters.targets import build_layout
from inference_svc.api.generate_call import checked_sampling
from inference_svc.api.server_facts import ServerFacts
from inference_svc.auto_settings import (
    Machine,
    ModelFacts,
    check_sharded_loras,
    resolve,
    resolve_images,
    resolve_model,
    to_engine_config,
)
from inference_svc.config import InferenceSettings
from inference_svc.core import NO_DEFAULTS, SamplingDefaults, SamplingParams
from inference_svc.engine.memory_fit import fit_device
from inference_svc.engine.ranks.group import END_S
from inference_svc.engine.ranks.nodes.node import Node, check_node
from inference_svc.engine.transport.messages import StoreMessage
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import DeviceFull, EngineFailed, UnsupportedModel
from inference_svc.host.cpus import usable_cpus
from inference_svc.host.device_faults import device_failure
from inference_svc.host.device_info import find_machine
from inference_svc.host.memory import resident_bytes
from inference_svc.metrics.definitions import DEFINITIONS
from inference_svc.metrics.fault_report import hold
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.classifier import read_activation, read_score_activation
from inference_svc.model.checkpoint.generation_config import FILE_NAME, read_sampling_defaults
from inference_svc.model.checkpoint.sentence_transformers import read_embedding_rule
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.quantised.chosen import weight_form
from inference_svc.model.recurrent_states import slot_bytes
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.results.classifier_rule import NO_CLASSIFIER, ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from inference_svc.results.logprobs import LogprobsMode
from inference_svc.server import InferenceServer, announcement_of, installed_version
from inference_svc.store.client import ImageClient, ImageClientRecipe, NoStore
from inference_svc.store.convert import from_registration
from inference_svc.store.credentials import StoreAccess, read_store_access
from inference_svc.store.replicas import Replicas
from inference_svc.text.no_tokenizer import NoTokenizer
from inference_svc.text.text_model import TextModel
from inference_svc.text.tokenizer import Tokenizer, tokenizer_bytes
from servicekit import interpreter_gc
from servicekit.errors import InvalidArgument
from servicekit.rpc.reload import reloading
from servicekit.rpc.server import announce_ready, stop_on_signals, with_port, withdraw_ready
from servicekit.settings.addresses import split_address
from servicekit.telemetry.metrics import MetricRegistry
from servicekit.telemetry.metrics_server import MetricsServer

PIPELINE_REFUSAL = "with --pipeline-parallel another process has its hidden states"
PACKAGES = ("loadout", "torch", "transformers", "grpcio")


async def serve(config: InferenceSettings) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises UnsupportedModel, or ValueError or OSError for settings that cannot be met; EngineFailed
    if the engine ends before, or the device fails: then after `fault_hold_seconds`.
    """
    stop = stop_on_signals()
    try:
        await (_serve_node if config.node_rank else _serve)(config, stop)
    except (EngineFailed, DeviceFull) as error:
        failure = await asyncio.to_thread(device_failure, error)
        if failure is not None:
            await hold(failure, config.metrics_listen, config.fault_hold_seconds, stop)
        if failure is None or failure is error:
            raise
        raise failure from error


async def _serve(config: InferenceSettings, stop: asyncio.Event) -> None:
    machine = await asyncio.to_thread(find_machine, config)
    config = resolve_images(config)
    decoder = _description(config)
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
                engine = await _loaded(load, config, stop)
                if engine is None:
                    return
                speed, notes = engine.speed, machine.speed_notes + engine.speed.notes
                facts = replace(
                    facts,
                    num_threads=speed.num_threads,
                    processor=speed.processor,
                    speed_notes=notes,
                    weight_formats=speed.weight_formats,
                )
                await server.start(engine, text, facts)
                interpreter_gc.resume()
                await server.run(stop)
            finally:
                await server.close()


async def _loaded(
    load: Load, config: InferenceSettings, stop: asyncio.Event
) -> EngineThread | EngineProcess | None:
    """Returns the engine when it is loaded; None if `stop` comes while other machines may be
    waited for."""
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    if config.nnodes == 1:
        return await loading
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        return loading.result()
    # The engine ends, and it fails.
    loading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return None


async def _serve_node(config: InferenceSettings, stop: asyncio.Event) -> None:
    """Computes for rank 0 of another machine until `stop`, and then as long as that one drains.
    Raises as `serve`; EngineFailed, too, when a rank ends, as all do when rank 0 has."""
    withdraw_ready(config.ready_file)
    machine = await asyncio.to_thread(find_machine, config)
    config = resolve_images(config)
    decoder = _description(config)
    config = resolve_settings(config, machine, decoder)
    read_store_access(config)
    engine_config = to_engine_config(config)
    facts = await asyncio.to_thread(check_node, engine_config)
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def on_change() -> None:
        loop.call_soon_threadsafe(changed.set)

    with ExitStack() as stack:
        node = Node(
            engine_config,
            facts,
            ImageClientRecipe(config),
            on_change,
        )
        stack.callback(node.close)
        page = MetricsServer(
            MetricRegistry(DEFINITIONS),
            *split_address(config.metrics_listen),
            lambda: node.has_joined,
        )
        stack.callback(page.close)
        address = with_port(config.metrics_listen, page.port)
        stopping = asyncio.ensure_future(stop.wait())
        is_announced = False
        while not stop.is_set() and not node.endings:
            changed.clear()
            if node.has_joined and not is_announced:
                announce_ready({"metrics": address}, config.ready_file, [])
                is_announced = True
            waiting = asyncio.ensure_future(changed.wait())
            await asyncio.wait((stopping, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if not stop.is_set():
            raise EngineFailed(f"{node.endings[0]}; this machine's other ranks end with it")
        if node.has_joined:  # rank 0 may have been told to end at the same time, and drains as long
            await asyncio.to_thread(node.wait_for_end, config.grace_seconds + END_S)


def _description(config: InferenceSettings) -> Decoder:
    """Raises UnsupportedModel."""
    assert config.max_prompt_images is not None, "the setting is resolved"
    with_pictures = config.max_prompt_images > 0
    return load_description(config.model, config.quantize, with_pictures=with_pictures)


def _load_tokenizer(config: InferenceSettings) -> TextModel:
    return Tokenizer(config.model, config.tool_parser) if config.tokenizer else NoTokenizer()


def describe_layout(config: InferenceSettings) -> str:
    """Returns the description of a server with these settings that it gives to the store: a
    RegisterLayoutRequest, as JSON. Raises InvalidSetting and UnsupportedModel."""
    config = resolve_images(config)
    decoder = _description(config)
    config = resolve_model(config, _model_facts(decoder))
    check_sharded_loras(config)
    if config.tensor_parallel > 1:
        decoder = of_rank(decoder, Rank(0, config.tensor_parallel), config.expert_parallel)
    layout = build_layout(
        decoder,
        config.base_model_names[0],
        getattr(torch, config.dtype),
        config.adapter_dtype,
        is_fully_sharded=config.fully_sharded_loras,
        has_classifiers=config.classifiers,
    )
    with hashing_base(config.model, decoder, usable_cpus()) as base:
        layout = layout.with_base(base())
    layout = with_unread(layout, config.model, decoder)
    announcement = announcement_of(config, weight_form(decoder, config.quantize))
    return MessageToJson(from_registration(layout, announcement), indent=None)


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
    images = ImageClient(replicas, access, config.store_share_socket) if config.store else NoStore()
    try:
        yield lambda: EngineThread(to_engine_config(config), images)
    finally:
        images.close()


def resolve_settings(
    config: InferenceSettings, machine: Machine, decoder: Decoder
) -> InferenceSettings:
    """Returns the settings with everything decided. Raises InvalidSetting for a setting that
    machine or model cannot fulfil, ValueError for memory that does not suffice."""
    stage = of_stage(decoder, 0, config.pipeline_parallel, config.tensor_parallel)
    part = of_rank(stage, Rank(0, config.tensor_parallel), config.expert_parallel)
    return resolve(config, machine, _model_facts(part), partial(fit_device, decoder=part))


def _model_facts(decoder: Decoder) -> ModelFacts:
    """Returns the facts of the first rank; of several stages, the most that any of them has."""
    layout = build_layout(decoder, "", torch.float32)
    stages = decoder.every_stage
    layouts = [build_layout(each, "", torch.float32) for each in stages]
    return ModelFacts(
        dtype=decoder.dtype,
        max_position_embeddings=decoder.max_position_embeddings,
        kv_elements_per_token=max(each.kv_elements_per_token for each in stages),
        kv_vectors_per_token=max(each.kv_vectors_per_token for each in stages),
        lora_targets=layout.modules,
        fused_targets=layout.fused_modules,
        may_add_tokens=decoder.layer_inputs is None and decoder.encoder is None,
        expert_elements_per_rank=max(each.expert_elements_per_rank for each in layouts),
        state_bytes=max(map(slot_bytes, stages)),
        is_encoder=decoder.encoder is not None,
        hidden_size=decoder.hidden_size,
        picture_tokens=0 if decoder.pictures is None else decoder.pictures.max_tokens,
        picture_elements=0 if decoder.pictures is None else decoder.pictures.row_size,
    )


def _facts(config: InferenceSettings, decoder: Decoder) -> ServerFacts:
    return ServerFacts(
        base_model=config.base_model_names[0],
        aliases=config.base_model_names[1:],
        architecture=decoder.architecture,
        dtype=config.dtype,
        adapter_dtype=config.dtype if config.adapter_dtype == "auto" else "float8_e4m3fn",
        kv_dtype=config.dtype if config.kv_dtype == "auto" else config.kv_dtype,
        weight_form=weight_form(decoder, config.quantize),
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
        versions={name: found for name in PACKAGES if (found := installed_version(name))},
        sampling=sampling_defaults(config, decoder.vocab_size),
        experts=decoder.expert_layers,
        embedding=_embedding_rule(config, decoder),
        classifier=_classifier_rule(config, decoder),
        generates=decoder.generates,
        placeholder_ids=decoder.placeholder_ids,
        pictures=picture_rule(decoder, config.max_prompt_images or 0),
    )


def picture_rule(decoder: Decoder, max_images: int) -> PictureRule | None:
    """Returns how a server reads pictures; None if it does not."""
    found = decoder.pictures
    if found is None:
        return None
    sizes = found.token_id, found.tiles, max_images
    return PictureRule(found.processor, *sizes, found.frame, has_rows=found.has_rows)


def _classifier_rule(config: InferenceSettings, decoder: Decoder) -> ClassifierRule:
    """Returns how the server classifies. Raises UnsupportedModel."""
    if not (decoder.labels or config.classifiers):
        return NO_CLASSIFIER
    refusal = PIPELINE_REFUSAL if config.pipeline_parallel > 1 else ""
    per_token, pooling = decoder.labels_tokens, Pooling.LAST
    if decoder.encoder is not None and decoder.encoder.head is not None:
        pooling = decoder.encoder.head.pooling
    score_activation, score_refusal = read_score_activation(config.model)
    return ClassifierRule(
        decoder.labels,
        read_activation(config.model),
        refusal,
        pooling,
        per_token,
        score_activation,
        score_refusal,
    )


def _embedding_rule(config: InferenceSettings, decoder: Decoder) -> EmbeddingRule:
    """Returns how the model embeds here."""
    pooling = Pooling.LAST if decoder.encoder is None else Pooling.MEAN
    rule = read_embedding_rule(config.model, decoder.hidden_size, pooling)
    if rule.max_tokens >= config.max_model_len:
        rule = replace(rule, max_tokens=0)  # the context is the limit
    return replace(rule, refusal=PIPELINE_REFUSAL) if config.pipeline_parallel > 1 else rule


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
