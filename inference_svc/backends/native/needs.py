"""The memory that the native backend takes, before any of it is allocated: the sizes of everything
that `backend` and `program` allocate, by the same functions."""

from __future__ import annotations

from dataclasses import replace

import torch

from inference_svc.adapters.targets import applied_to_pictures, computed_groups, layout_of
from inference_svc.backends.arena import table_bytes
from inference_svc.backends.base import MemoryNeeds, states_bytes
from inference_svc.backends.native import encoder
from inference_svc.backends.native.exchange import shared_bytes
from inference_svc.backends.native.lora import BIAS, MAX_EXPERTS_TARGETS, norm_role
from inference_svc.backends.native.program import routings_bytes
from inference_svc.backends.native.towers.memory import PartArrays, tower_shapes
from inference_svc.backends.native.towers.tiles import tile_bytes
from inference_svc.backends.native.workspace import max_outputs, workspace_bytes
from inference_svc.backends.pictures import handed_bytes
from inference_svc.core import EngineConfig
from inference_svc.host.cpus import compute_threads
from inference_svc.model.checkpoint.parameters import parameters, weights_bytes
from inference_svc.model.description import Decoder
from inference_svc.model.sharding.pictures import has_tower
from inference_svc.pictures.processor import CHANNELS
from kernels.attention.native_memory import AttentionShape
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.quantised.pack import packed_bytes

SAMPLER_COPIES = 2
"""Copies of the logits in fp32 that choosing tokens takes beside the logits."""


def memory_needs(config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
    """Returns the bytes of weights, and of the memory of steps."""
    dtype = getattr(torch, config.dtype)
    needed_bytes = weights_bytes(decoder, dtype)
    # Packed, the head cannot share the embedding's memory.
    if decoder.head.is_shared and decoder.has_head:
        needed_bytes += decoder.vocab_size * decoder.hidden_size * dtype.itemsize
    needed_bytes += _padding_bytes(decoder)
    sampler_bytes = SAMPLER_COPIES * 4 * config.max_sequences * decoder.num_outputs
    others_bytes = sampler_bytes + table_bytes(config, decoder, config.max_sequences)
    others_bytes += _exchange_bytes(config)
    return MemoryNeeds(
        needed_bytes,
        held_bytes(config, decoder) + others_bytes,
        recurrent_bytes=states_bytes(config, decoder),
    )


def _exchange_bytes(config: EngineConfig) -> int:
    """Returns a rank's part of the memory that ranks of one machine share."""
    if config.num_ranks == 1 or config.nodes is not None:
        return 0
    num_threads = compute_threads(config.num_threads, config.num_computing)
    found = shared_bytes(config.num_ranks, num_threads, config.pipeline_parallel)
    return found // config.num_ranks


def _padding_bytes(decoder: Decoder) -> int:
    """Returns the bytes that packed weights in few bits take beyond their formats'."""
    return sum(
        packed_bytes(part.num_rows, each.in_size, part.format)
        - part.format.num_bytes(part.num_rows, each.in_size)
        for each in parameters(decoder)
        for part in each.parts
        if part.format is not None
    )


def held_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the bytes of `NativeBackend.workspace_bytes`."""
    return (
        workspace_bytes(config, decoder)
        + routings_bytes(decoder, config.max_batch_tokens)
        + _rows_bytes(config, decoder)
        + _adapters_bytes(config, decoder)
    )


def tower_needs(config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
    """Returns the weights of the vision tower, if it is here; and the workspace of a part of a
    tile, the state of the largest tile, which stays while other steps are computed, and the
    embeddings of pictures. Of several ranks each has the ones of a step, too."""
    found, dtype = decoder.pictures, getattr(torch, config.dtype)
    shared_bytes = handed_bytes(decoder, config.max_batch_tokens, dtype)
    if found is None or not has_tower(decoder):
        return MemoryNeeds(0, shared_bytes)
    tower, form = found.tower, found.tiles
    longest = found.max_inner_tokens(config.max_model_len)
    most = form.max_part(longest)
    of_part = replace(config, max_batch_tokens=most, max_added_tokens=0)
    num_threads = compute_threads(config.num_threads, config.num_computing)
    patches = tower.patches
    assert patches is not None
    # Patches that a layer reads are a value of the workspace, and their layer one of the weights.
    num_pixels = CHANNELS * form.patch_size**2 if patches.layer is None else 0
    others_bytes = (
        workspace_bytes(of_part, tower)
        + PartArrays.bytes_of(most)
        + most * num_pixels * torch.float32.itemsize
        + sum(each.num_bytes(num_threads) for each in tower_shapes(tower, dtype, most))
        + tile_bytes(tower, dtype, longest)
        + _tower_adapters_bytes(of_part, decoder)
        + config.prompt_image_bytes
        + shared_bytes
    )
    kernel_bytes = tower.hidden_size * num_pixels * torch.float32.itemsize
    return MemoryNeeds(weights_bytes(tower, dtype) + kernel_bytes, others_bytes)


def _tower_adapters_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of adapters' operations in parts of `max_batch_tokens`: of tokens, of the
    ones that the connector reads, and of cells."""
    found = decoder.pictures
    assert found is not None
    itemsize, num_mixes = getattr(torch, config.dtype).itemsize, config.max_sequences
    targets = applied_to_pictures(layout_of(config, decoder), config.lora_targets)
    most = max((len(group.targets) for group in targets.groups.values()), default=1)
    num_tokens = config.max_batch_tokens
    num_cells = num_tokens // found.tiles.merge**2
    of_cells = replace(config, max_batch_tokens=num_cells)
    num_bytes = sum(_token_weights_bytes(each, found.tower) for each in (config, of_cells))
    for max_tokens in (num_tokens, num_tokens, num_cells, 0):
        sizes = max_tokens, num_mixes, config.max_lora_rank
        num_bytes += NativeLora.shrunk_bytes(most, *sizes, itemsize)
        num_bytes += NativeLoraPlan.bytes_of(max_tokens, num_mixes, has_experts=not max_tokens)
    return num_bytes


def _rows_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of attention, each thread's and the work items of each kind of layers, and
    of an encoder's token types."""
    item_bytes = getattr(torch, config.dtype).itemsize
    num_threads = compute_threads(config.num_threads, config.num_computing)
    kinds: dict[AttentionShape, set[tuple[int | None, bool]]] = {}
    for each in decoder.attentions:
        shape = AttentionShape(each.num_heads, each.num_kv_heads, each.head_dim, item_bytes)
        kinds.setdefault(shape, set()).add((each.window, each.only_looks_back))
    return encoder.encoder_bytes(config, decoder, num_threads) + sum(
        shape.num_bytes(config.max_batch_tokens, config.max_sequences, num_threads, len(found))
        for shape, found in kinds.items()
    )


def _adapters_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of adapters' operations: plans, shrunk inputs, and weights of tokens."""
    itemsize, num_mixes = getattr(torch, config.dtype).itemsize, config.max_sequences
    chosen = max((each.num_chosen for each in decoder.mixtures), default=0)
    groups = computed_groups(config, decoder).values()
    most = max((len(group.targets) for group in groups), default=1)
    plans = (
        (config.max_batch_tokens, most, False),
        (max_outputs(config, decoder), most, False),
        (config.max_batch_tokens * chosen, MAX_EXPERTS_TARGETS, True),
    )
    num_bytes = _token_weights_bytes(config, decoder)
    for max_tokens, num_targets, has_experts in plans:
        sizes = max_tokens, num_mixes, config.max_lora_rank
        num_bytes += NativeLora.shrunk_bytes(num_targets, *sizes, itemsize)
        num_bytes += NativeLoraPlan.bytes_of(max_tokens, num_mixes, has_experts=has_experts)
    return num_bytes


def _token_weights_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of norms' weights that are each token's own."""
    dtype = getattr(torch, config.dtype)
    norms = [
        (name, each.num_bytes(dtype), each.norm.has_bias)
        for each in parameters(decoder)
        if each.norm is not None
        for name in each.members
    ]
    sizes = {(norm_role(name), size) for name, size, _ in norms}
    # Biases are as wide as the weights of norms that have them.
    sizes |= {(norm_role(f"{name}{BIAS}"), size) for name, size, has_bias in norms if has_bias}
    of_rows = (size for role, size in sizes if role == "norm")
    of_tokens = (size for _, size in sizes)
    # Of an encoder the outputs are as many, and share the memory.
    num_outputs = config.max_sequences if decoder.encoder is None else 0
    return config.max_batch_tokens * sum(of_tokens) + num_outputs * sum(of_rows)
