"""Wires the service, from settings to a running server: reads the model, builds the engine, serves,
drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

from inference_svc.api.service import ServerFacts
from inference_svc.config import (
    InferenceSettings,
    ModelFacts,
    resolve,
    to_engine_config,
)
from inference_svc.engine.messages import StoreMessage
from inference_svc.engine.process import EngineProcess
from inference_svc.engine.thread import EngineThread
from inference_svc.host.device_info import find_machine
from inference_svc.host.memory import resident_bytes
from inference_svc.model.geometry import ModelGeometry, load_geometry
from inference_svc.server import InferenceServer
from inference_svc.store.client import ImageClient, ImageClientRecipe, NoStore
from inference_svc.store.credentials import StoreAccess, read_store_access
from inference_svc.store.replicas import Replicas
from inference_svc.text.tokenizer import Tokenizer, tokenizer_bytes

PACKAGES = ("loadout", "torch", "transformers", "grpcio")


async def serve(config: InferenceSettings) -> int:
    """Returns the process's exit status, after SIGTERM or SIGINT.

    Raises UnsupportedModel, or ValueError or OSError for settings that cannot be met; EngineFailed
    if the engine's process dies before it serves.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    geometry = load_geometry(config.model)
    config = resolve(config, find_machine(config), model_facts(geometry))
    access = read_store_access(config)
    server = InferenceServer(config, access)
    if config.policy_file or config.tls_cert_file or config.audit_file:
        # Without these, SIGHUP keeps its default: a closed terminal ends the server.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    make_engine = _in_process if config.engine == "process" else _in_thread
    with make_engine(config, server.replicas, access) as load:
        try:
            text = await asyncio.to_thread(Tokenizer, config.model)
            engine = await asyncio.to_thread(load)
            await server.start(engine, text, _facts(config, geometry))
            return await server.run(stop)
        finally:
            await server.close()


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
        tokenizer_bytes=tokenizer_bytes(config.model),
    )
    engine = EngineProcess(engine_config, ImageClientRecipe(config), replicas.on_update)
    replicas.publish_to(lambda update: engine.send(StoreMessage(update)))
    try:
        yield engine.load
    finally:
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


def model_facts(geometry: ModelGeometry) -> ModelFacts:
    return ModelFacts(
        dtype=geometry.dtype,
        max_position_embeddings=geometry.max_position_embeddings,
        kv_elements_per_token=2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim,
    )


def _facts(config: InferenceSettings, geometry: ModelGeometry) -> ServerFacts:
    return ServerFacts(
        base_model=config.base_model_names[0],
        aliases=config.base_model_names[1:],
        architecture=geometry.architecture,
        dtype=config.dtype,
        device=config.device,
        vocab_size=geometry.vocab_size,
        max_model_len=config.max_model_len,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_sequences=config.max_sequences,
        max_batch_tokens=config.max_batch_tokens,
        max_queue=config.max_queue,
        versions={name: found for name in PACKAGES if (found := _version(name))},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # run from a source tree that is not installed
