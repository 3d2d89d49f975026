"""The features of a decoder that not every decoder has and that a backend must compute.

Read off the description itself, so that none can be forgotten. Each type of part is a feature, such
as "dense", and so is each field that says more than its default ("attention.softcap"), each choice
of several ("norm.kind=layer"), and the absence of a part without a default ("attention.rope=none").
Features that only sizes show have names of their own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from inference_svc.model.description import Decoder, Pictures
from kernels.quantised import WeightFormat

NOT_COMPUTED = frozenset(
    {
        # Where tensors are, and how they are called.
        *("norm.module", "projection.fused", "projection.is_stored_fused", "block.unused"),
        "projection.is_transposed",
        *("norm.tensor", "norm.weight_scale", "experts_projection.is_transposed"),
        *("experts_projection.is_interleaved", "experts_projection.may_be_transposed"),
        "decoder.wrapper",
        *("decoder.num_unused_layers", "decoder.quantisation", "weight_format.scales"),
        # When a sequence ends, and whether it may begin.
        *("encoder_inputs.token_types", "encoder_inputs.unused", "encoder_inputs.head"),
        *("decoder.eos_token_ids", "decoder.generates", "decoder.labels"),
        "decoder.labels_tokens",
        *("decoder.placeholder_ids", "layer_inputs.of_padding"),
        # The fields from which `Rope` itself makes frequencies and a scale.
        *("rope.rope_type", "rope.rope_theta", "rope.factor", "rope.attention_factor"),
        *("rope.original_max_position_embeddings", "rope.truncate", "rope.alpha", "rope.is_long"),
        *("rope.low_freq_factor", "rope.high_freq_factor", "rope.beta_fast", "rope.beta_slow"),
        *("rope.mscale", "rope.mscale_all_dim", "rope.long_factor", "rope.short_factor"),
    }
)
"""Fields that no backend computes with."""

HEAD_SIZES = (256, 512)
"""Heads above each of these sizes are a feature."""


def features(decoder: Decoder) -> frozenset[str]:
    """Returns the names of the features of a decoder."""
    return frozenset((*_features(decoder), *_of_sizes(decoder)))


def _features(part: Any) -> Iterator[str]:
    kind = kind_of(type(part))
    yield kind
    if isinstance(part, WeightFormat) and part.has_odd_groups:
        yield f"{kind}.odd_groups"
    for each in fields(part):
        name, value = f"{kind}.{each.name}", getattr(part, each.name)
        if name in NOT_COMPUTED:
            continue
        if isinstance(value, enum.Enum):
            yield f"{name}={value.value}"
        elif value is None and each.default is MISSING:
            yield f"{name}=none"
        elif each.default is not MISSING and value != each.default:
            yield name
        if isinstance(value, Pictures):
            continue  # torch computes a tower that the decoder's backend does not
        for inner in value if isinstance(value, tuple) else (value,):
            if is_dataclass(inner):
                yield from _features(inner)


def _of_sizes(decoder: Decoder) -> Iterator[str]:
    """Yields the features that sizes show: whole-width norms, wide heads, and differences between
    layers."""
    decoder = decoder.of_all_stages  # which choose the same backend
    for each in decoder.attentions:
        if each.norms_all_heads:
            yield "attention.norms_of_all_heads"
        yield from (f"attention.head_dim>{size}" for size in HEAD_SIZES if each.head_dim > size)
    if len(decoder.kv_shapes) > 1:
        yield "decoder.kv_shapes"
    if len(decoder.ropes) > 1:
        yield "decoder.ropes"
    if len(decoder.windows) > 1:
        yield "decoder.windows"


def kind_of(part: type) -> str:
    """Returns the name of a part's type as fields are written, such as "layer_input"."""
    return "".join("_" + c.lower() if c.isupper() else c for c in part.__name__).lstrip("_")
