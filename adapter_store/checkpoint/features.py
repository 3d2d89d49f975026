"""The features that an adapter uses, by kind: engines differ in them, and the table of trainers and
contents has them as its columns."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

from adapter_store.checkpoint.formats.select import Format, find_format
from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.reading.files import CheckpointLimits, read_capped
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import Changes, ExpertWeights, Replacement
from contract.adapter_files import CONFIG_FILE, is_shard
from contract.images.targets import TargetKind

FUSED = frozenset(
    {"qkv_proj", "gate_up_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv"}
)
"""Modules that compute several projections that other models have apart."""


class Feature(enum.Enum):
    """One kind of content. The value is for programs; see WORDS."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    FUSED = "fused"
    RSLORA = "rslora"
    RANK_PATTERN = "rank_pattern"
    ALPHA_PATTERN = "alpha_pattern"
    LAYERS = "layers"
    TRANSPOSED = "transposed"
    LORA_BIAS = "lora_bias"
    DORA = "dora"
    BIASES = "biases"
    NORMS = "norms"
    WHOLE_WEIGHTS = "whole_weights"
    SAVED_ALONG = "saved_along"
    TOKEN_ROWS = "token_rows"
    EXPERTS = "experts"
    EXPERT_PARAMETERS = "expert_parameters"
    ALORA = "alora"
    MLX = "mlx"
    SHARDS = "shards"


WORDS: Mapping[Feature, str] = {
    Feature.LINEAR: "LoRA of linear layers",
    Feature.EMBEDDING: "LoRA of the embedding",
    Feature.HEAD: "LoRA of the head",
    Feature.FUSED: "LoRA of fused modules",
    Feature.RSLORA: "rank-stabilised scale (`use_rslora`)",
    Feature.RANK_PATTERN: "ranks by module (`rank_pattern`)",
    Feature.ALPHA_PATTERN: "scales by module (`alpha_pattern`)",
    Feature.LAYERS: "some layers only (`layers_to_transform`)",
    Feature.TRANSPOSED: "`fan_in_fan_out`",
    Feature.LORA_BIAS: "biases of LoRA (`lora_bias`)",
    Feature.DORA: "DoRA",
    Feature.BIASES: "biases of the base",
    Feature.NORMS: "norms of the base",
    Feature.WHOLE_WEIGHTS: "whole matrices (`modules_to_save`)",
    Feature.SAVED_ALONG: "a copy of the base's embedding or head",
    Feature.TOKEN_ROWS: "rows of tokens (`trainable_token_indices`)",
    Feature.EXPERTS: "LoRA of experts",
    Feature.EXPERT_PARAMETERS: "LoRA of experts' parameters (`target_parameters`)",
    Feature.ALORA: "invocation tokens (aLoRA)",
    Feature.MLX: "files of MLX-LM",
    Feature.SHARDS: "weights in shards",
}
"""The features in words, as documentation says them."""

_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_BY_FIELD = {
    "use_rslora": Feature.RSLORA,
    "rank_pattern": Feature.RANK_PATTERN,
    "alpha_pattern": Feature.ALPHA_PATTERN,
    "layers_to_transform": Feature.LAYERS,
    "fan_in_fan_out": Feature.TRANSPOSED,
    "alora_invocation_tokens": Feature.ALORA,
}
"""Fields of PEFT's config that switch one on."""


def features_of(checkpoint: Checkpoint, limits: CheckpointLimits) -> tuple[Feature, ...]:
    """Returns the features that a checked adapter uses, in order. Raises InvalidAdapter, and
    CorruptData if its files have changed meanwhile."""
    found = {feature for changes in checkpoint.changes for feature in features_in(changes)}
    if find_format(checkpoint.folder) is Format.MLX:
        found.add(Feature.MLX)
    else:
        found.update(_of_config(checkpoint, limits))
    if any(is_shard(record.file) for record in checkpoint.records):
        found.add(Feature.SHARDS)
    return tuple(feature for feature in Feature if feature in found)


def _of_config(checkpoint: Checkpoint, limits: CheckpointLimits) -> Iterator[Feature]:
    data = read_capped(checkpoint.folder, CONFIG_FILE, limits.max_config_bytes)
    fields: Mapping[str, Any] = parse_object(data, CONFIG_FILE)
    for name, feature in _BY_FIELD.items():
        value = fields.get(name)
        if value is not None and value is not False and value not in ([], {}):
            yield feature


def features_in(changes: Changes) -> Iterator[Feature]:
    """Yields the features of one module's weights."""
    if isinstance(changes, ExpertWeights):
        yield Feature.EXPERT_PARAMETERS if changes.is_parameter else Feature.EXPERTS
    elif isinstance(changes, TargetWeights):
        yield _of_module(changes)
        if changes.bias is not None:
            yield Feature.LORA_BIAS
        if changes.magnitude is not None:
            yield Feature.DORA
    elif isinstance(changes, Replacement):
        yield _of_replacement(changes)


def _of_module(weights: TargetWeights) -> Feature:
    if weights.kind is TargetKind.EMBEDDING:
        return Feature.EMBEDDING
    if _OF_EXPERT.search(weights.name):
        return Feature.EXPERTS
    module = weights.name.rpartition(".")[2]
    if module == OUTPUT_LAYER:
        return Feature.HEAD
    return Feature.FUSED if module in FUSED else Feature.LINEAR


def _of_replacement(replacement: Replacement) -> Feature:
    if replacement.is_copy:
        return Feature.SAVED_ALONG
    if replacement.row_ids is not None:
        return Feature.TOKEN_ROWS
    if replacement.kind is not TargetKind.VECTOR:
        return Feature.WHOLE_WEIGHTS
    return Feature.BIASES if replacement.name.endswith(".bias") else Feature.NORMS
