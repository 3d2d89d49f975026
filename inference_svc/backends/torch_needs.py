"""The memory of steps in torch on a CPU, read off the list of their operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inference_svc.adapters.targets import computed_groups
from inference_svc.backends.base import table_bytes
from inference_svc.core import EngineConfig
from inference_svc.model.description import Attention, Decoder
from inference_svc.model.lifetimes import ValueSizes, peak_bytes
from inference_svc.model.operations import (
    AddNorm,
    Attend,
    Combine,
    Logits,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    RotateAndStore,
    Route,
)
from inference_svc.model.walk import operations
from kernels.lora import LoraGroup

PAIR_BYTES = 64
"""A pair's part of a mixture's routing."""
ROUTE_COPIES = 6
"""Copies of a router's logits in fp32 that choosing experts takes."""
SCORE_COPIES = 3
"""Copies of attention's scores in fp32, where they are bounded or have sinks."""
SAMPLER_COPIES = 2
"""Copies of the logits in fp32 that choosing tokens takes beside the logits."""


def step_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the workspace of the widest step of `max_batch_tokens` tokens, one longest sequence
    among them; the table's rows of sums of adapters; and the sampler's copies of the logits."""
    dtype = getattr(torch, config.dtype)
    sizes = ValueSizes.of(decoder, config.max_batch_tokens, config.max_sequences, dtype, PAIR_BYTES)
    groups, found = computed_groups(config, decoder), operations(decoder)
    # The angles have cos and sin of the whole width, throughout.
    angles = sum(rope.rotary_size(head_dim) for rope, head_dim in decoder.ropes)
    kept_bytes = config.max_batch_tokens * angles * dtype.itemsize
    kept_bytes += table_bytes(config, decoder, config.max_sequences)
    logits_bytes = 4 * config.max_sequences * decoder.vocab_size

    def own_bytes(op: Op, before: Op | None) -> int:
        return _own_bytes(op, config, sizes, groups)

    largest_bytes = peak_bytes((*found.layers, *found.head), found.kept, sizes, own_bytes)
    return kept_bytes + max(largest_bytes, (1 + SAMPLER_COPIES) * logits_bytes)


def _own_bytes(
    op: Op, config: EngineConfig, sizes: ValueSizes, groups: Mapping[str, LoraGroup]
) -> int:
    """Returns the memory of an operation beside its inputs and outputs, while it runs."""
    item_bytes, num_rows = sizes.dtype.itemsize, sizes.rows(op.out)
    of_out = num_rows * op.out.width
    if isinstance(op, Project | ProjectExperts):
        num_bytes = 0
        if op.group in groups:
            shrunk = len(groups[op.group].targets) * config.max_lora_rank
            num_bytes = num_rows * shrunk * item_bytes
        if op.out.is_wide:  # inputs and weights are copied to fp32
            num_bytes += 4 * op.inputs[0].width * (num_rows + op.out.width)
        return num_bytes
    if isinstance(op, RotateAndStore):
        return 2 * of_out * item_bytes + 4 * of_out
    if isinstance(op, Attend):
        return _attention_bytes(op.attention, config, item_bytes) + of_out * item_bytes
    if isinstance(op, AddNorm | NormOf):
        return 4 * of_out + of_out * item_bytes
    if isinstance(op, Route):
        return ROUTE_COPIES * 4 * num_rows * op.experts.num_experts
    if isinstance(op, Combine):
        return 4 * sizes.max_pairs * op.out.width + 2 * of_out * item_bytes
    return (4 + 2 * item_bytes) * of_out if isinstance(op, Logits) else 0


def _attention_bytes(attention: Attention, config: EngineConfig, item_bytes: int) -> int:
    """Returns the memory of attention of one longest sequence's chunk: its gathered keys and
    values, and the scores or the mask."""
    num_cells = min(config.max_model_len, (attention.window or config.max_model_len))
    num_queries = min(config.max_prefill_chunk, config.max_batch_tokens)
    num_cells = min(config.max_model_len, num_cells + num_queries)
    num_bytes = num_cells * 2 * attention.kv_size * item_bytes + num_queries * num_cells
    if attention.softcap is not None or attention.sinks:
        num_bytes += SCORE_COPIES * 4 * attention.num_heads * num_queries * num_cells
    return num_bytes
