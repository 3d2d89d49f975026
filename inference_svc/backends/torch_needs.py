"""The memory of steps in torch on a CPU, read off the list of their operations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.adapters.targets import AppliedTargets, applied_targets, layout_of
from inference_svc.backends.base import table_bytes
from inference_svc.core import EngineConfig
from inference_svc.model.description import Attention, ClampedSwiglu, Decoder
from inference_svc.model.lifetimes import ValueSizes, token_weights_bytes
from inference_svc.model.operations import (
    AddNorm,
    Attend,
    Combine,
    Embed,
    Gate,
    Growth,
    Logits,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    RotateAndStore,
    Route,
)
from inference_svc.model.transformer import transformer_bytes
from kernels.lora.table import MAX_PARTS

PAIR_BYTES = 64
"""A pair's part of a mixture's routing."""
ROUTE_COPIES = 6
"""Copies of a router's logits in fp32 that choosing experts takes."""
SCORE_COPIES = 3
"""Copies of attention's scores in fp32, where they are bounded or have sinks."""
CLAMPED_COPIES = 6
"""Copies in fp32 that a clamped activation takes."""
OUTPUT_COPIES = 5
"""Copies of a target's outputs in fp32 that adapters take which have more than A and B."""
SAMPLER_COPIES = 2
"""Copies of the logits in fp32 that choosing tokens takes beside the logits."""


def step_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the workspace of the widest step of `max_batch_tokens` tokens, one longest sequence
    among them; the table's rows of sums of adapters; and the sampler's copies of the logits. It is
    an upper bound: an operation is counted with adapters of every kind."""
    dtype = getattr(torch, config.dtype)
    sizes = ValueSizes.of(decoder, config.max_batch_tokens, config.max_sequences, dtype, PAIR_BYTES)
    layout = layout_of(config, decoder)
    targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
    own = _OwnBytes(config, sizes, targets)
    logits_bytes = 4 * config.max_sequences * decoder.vocab_size

    largest_bytes = transformer_bytes(decoder, sizes, own.of_op)
    sampler_bytes = (1 + SAMPLER_COPIES) * logits_bytes
    return table_bytes(config, decoder, config.max_sequences) + max(largest_bytes, sampler_bytes)


class _OwnBytes(NamedTuple):
    """The memory of an operation beside its inputs and outputs, while it runs."""

    config: EngineConfig
    sizes: ValueSizes
    targets: AppliedTargets

    def of_op(self, op: Op, before: Op | None) -> int:
        """Returns the bytes of an operation."""
        item_bytes, num_rows = self.sizes.dtype.itemsize, self.sizes.rows(op.out)
        of_out = num_rows * op.out.width
        num_bytes = 2 * token_weights_bytes(op, self.sizes, self.targets.weights)
        if isinstance(op, Project):
            num_bytes += self._group_bytes(op.group, num_rows)
            if op.out.is_wide:  # inputs and weights are copied to fp32
                num_bytes += 4 * op.inputs[0].width * (num_rows + op.out.width)
        elif isinstance(op, ProjectExperts):
            num_bytes += self._group_bytes(op.group, num_rows) + 4 * of_out
        elif isinstance(op, RotateAndStore):
            num_bytes += 2 * of_out * item_bytes + 4 * of_out
        elif isinstance(op, Attend):
            num_bytes += _attention_bytes(op.attention, self.config, item_bytes)
            num_bytes += 2 * of_out * item_bytes
        elif isinstance(op, AddNorm | NormOf):
            num_bytes += 4 * of_out + of_out * item_bytes
        elif isinstance(op, Gate) and isinstance(op.activation, ClampedSwiglu):
            num_bytes += CLAMPED_COPIES * 4 * of_out
        elif isinstance(op, Gate):
            num_bytes += of_out * item_bytes
        elif isinstance(op, Route):
            of_pairs = self.sizes.max_pairs * PAIR_BYTES
            num_bytes += ROUTE_COPIES * 4 * num_rows * op.experts.num_experts + of_pairs
        elif isinstance(op, Combine):
            num_bytes += 2 * 4 * self.sizes.max_pairs * op.out.width + 2 * of_out * item_bytes
        elif isinstance(op, Embed | Growth):
            num_bytes += 32 * num_rows + self._group_bytes(EMBEDDING, num_rows)
        elif isinstance(op, Logits):
            padded = num_rows * (op.out.width + self.config.max_added_tokens)
            num_bytes += self._group_bytes(HEAD, num_rows) + (4 + 4 * item_bytes) * padded
        return num_bytes

    def _group_bytes(self, name: str, num_rows: int) -> int:
        """Returns the memory of a group's adapters: the shrunk inputs of all parts of a sum, and
        copies of a target's outputs in fp32."""
        group = self.targets.groups.get(name)
        if group is None:
            return 0
        widest, rank = max(group.out_features), self.config.max_lora_rank
        shrunk = 4 * num_rows * MAX_PARTS * len(group.targets) * rank
        return (
            shrunk + OUTPUT_COPIES * 4 * num_rows * widest + 4 * rank * (widest + group.in_features)
        )


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
