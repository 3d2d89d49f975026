"""Chooses how a model is computed, and makes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import ModelLayout, lora_groups
from inference_svc.backends.base import StepModel
from inference_svc.backends.cuda import DeviceModel
from inference_svc.backends.cuda_graphs import CudaRecorder
from inference_svc.backends.cuda_inputs import DeviceStep
from inference_svc.backends.cuda_lora import DeviceLora
from inference_svc.backends.native import NativeTransformer
from inference_svc.backends.native_buffers import StepArrays
from inference_svc.backends.native_lora import NativeLoraOps
from inference_svc.backends.native_model import NativeModel
from inference_svc.backends.native_workspace import Workspace
from inference_svc.backends.torch import TorchModel
from inference_svc.engine.config import EngineConfig
from inference_svc.model.decoder import Transformer
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import Linear
from inference_svc.model.weights import load_weights
from kernels.attention import KVCache
from kernels.host_memory import Slab
from kernels.linear import PackedLinear
from kernels.lora import LoraGroup
from kernels.native.library import Library, load

log = logging.getLogger(__name__)


def native_library(config: EngineConfig) -> Library | None:
    """The native kernels, if they are wanted, to be had, and compute this model. Logs what keeps
    them from it."""
    if not config.native_kernels or torch.device(config.device).type != "cpu":
        return None
    if config.dtype not in ("float32", "bfloat16"):
        log.warning("the native kernels do not compute %s: the torch path serves", config.dtype)
        return None
    return load()


def build_model(
    config: EngineConfig,
    geometry: ModelGeometry,
    layout: ModelLayout,
    kv_cache: KVCache,
    arena: Arena,
    library: Library | None,
) -> tuple[StepModel, int]:
    """The model, its weights read, and the bytes of them. Raises UnsupportedModel."""
    dtype, groups = getattr(torch, config.dtype), lora_groups(layout)
    if library is None:
        plain = load_weights(config.model_dir, geometry, dtype, config.device, Linear)
        decoder = Transformer(geometry, plain)
        if arena.device.type != "cpu":
            model = _device_model(config, decoder, kv_cache, arena, groups)
            model.warm_up()
            return model, plain.num_bytes
        return TorchModel(decoder, kv_cache, arena, groups), plain.num_bytes
    pack = partial(PackedLinear.pack, allocate=Slab().take)
    packed = load_weights(config.model_dir, geometry, dtype, config.device, pack)
    max_pages = -(-config.max_model_len // config.page_size)
    step = StepArrays(config.max_batch_tokens, config.max_sequences, max_pages, config.page_size)
    lora = NativeLoraOps(arena, groups, config.max_batch_tokens, config.max_sequences)
    workspace = Workspace.allocate(geometry, config.max_batch_tokens, config.max_sequences, dtype)
    transformer = NativeTransformer(geometry, packed, kv_cache, step, workspace, lora, library)
    return NativeModel(transformer, step, lora, library.variant), packed.num_bytes


def _device_model(
    config: EngineConfig,
    transformer: Transformer,
    kv_cache: KVCache,
    arena: Arena,
    groups: Mapping[str, LoraGroup],
) -> DeviceModel:
    max_tokens, max_rows = config.max_batch_tokens, config.max_sequences
    max_pages = -(-config.max_model_len // config.page_size)
    step = DeviceStep(
        max_tokens,
        max_rows,
        max_pages,
        config.page_size,
        arena.device,
        reserved_bytes=DeviceLora.num_bytes(max_tokens, max_rows),
    )
    lora = DeviceLora(arena, groups, step.block, max_tokens, max_rows)
    record = CudaRecorder() if config.cuda_graphs else None
    return DeviceModel(transformer, kv_cache, step, lora, max_rows, record)
