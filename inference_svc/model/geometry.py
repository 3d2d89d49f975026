"""Reads the shapes and constants of a decoder from its model directory's config.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import (
    DEFAULTS,
    Architecture,
    SlidingWindow,
    find_architecture,
)
from inference_svc.model.files import CONFIG, read_json
from inference_svc.model.generation_config import read_generation_config
from inference_svc.model.rope import Rope, parse_rope


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The shapes and constants of one decoder.

    `sliding_windows[i]` is how many positions a query of layer i attends to, its own included;
    None: all. `dtype` is what the weights were saved as, by torch's name. `config_sha256` is the
    hex digest of config.json as canonical JSON: keys sorted, no spaces.
    """

    architecture: str
    config_sha256: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def load_geometry(model_dir: Path) -> ModelGeometry:
    """Reads config.json, and the end tokens of generation_config.json where there is one.

    Raises UnsupportedModel naming the key that is malformed or not honoured.
    """
    config = read_json(model_dir / CONFIG)
    architecture = find_architecture(config)
    values = {**DEFAULTS, **architecture.defaults, **config}
    if values["hidden_act"] != "silu":
        raise _unsupported("hidden_act", values["hidden_act"], "only silu is supported")
    num_heads = _positive(values, "num_attention_heads")
    hidden_size = _positive(values, "hidden_size")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = num_heads
    if values["head_dim"] is None:
        if hidden_size % num_heads:
            raise _unsupported("hidden_size", hidden_size, f"not a multiple of {num_heads} heads")
        values["head_dim"] = hidden_size // num_heads
    max_position_embeddings = _positive(values, "max_position_embeddings")
    geometry = ModelGeometry(
        architecture=architecture.name,
        config_sha256=_canonical_sha256(config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        vocab_size=_positive(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(values, "intermediate_size"),
        num_layers=_positive(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(values, "num_key_value_heads"),
        head_dim=_positive(values, "head_dim"),
        rms_norm_eps=_epsilon(values["rms_norm_eps"]),
        max_position_embeddings=max_position_embeddings,
        rope=parse_rope(config, max_position_embeddings),
        sliding_windows=_sliding_windows(values, architecture),
        qkv_bias=_flag(values, architecture.qkv_bias),
        o_bias=_flag(values, architecture.o_bias),
        mlp_bias=_flag(values, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=_flag(values, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(model_dir, values),
    )
    if num_heads % geometry.num_kv_heads:
        reason = f"does not divide num_attention_heads {num_heads}"
        raise _unsupported("num_key_value_heads", geometry.num_kv_heads, reason)
    if geometry.head_dim % 2:
        raise _unsupported("head_dim", geometry.head_dim, "rotary embedding needs an even size")
    return geometry


def _canonical_sha256(config: Mapping[str, Any]) -> str:
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _sliding_windows(
    values: Mapping[str, Any], architecture: Architecture
) -> tuple[int | None, ...]:
    """Returns the window of each layer; see `SlidingWindow`."""
    num_layers = _positive(values, "num_hidden_layers")
    by_layer = architecture.sliding_window is SlidingWindow.SOME_LAYERS
    has_window = values.get("sliding_window") is not None and (
        not by_layer or _flag(values, "use_sliding_window")
    )
    window = _positive(values, "sliding_window") if has_window else None
    first = _count(values, "max_window_layers") if by_layer else 0
    plain = tuple(window if layer >= first else None for layer in range(num_layers))
    if values.get("layer_types") is None:
        return plain
    windows = _windows_of_layer_types(values["layer_types"], num_layers, window)
    if not by_layer and windows != plain:
        reason = f"{architecture.name} has the same attention in all layers"
        raise _unsupported("layer_types", values["layer_types"], reason)
    return windows


def _windows_of_layer_types(
    layer_types: Any, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    kinds: dict[Any, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise _unsupported("layer_types", layer_types, f"must name {num_layers} layers")
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in kinds:
            reason = f"supported here are {', '.join(kinds)}"
            raise _unsupported("layer_types", kind, reason)
    return tuple(kinds[kind] for kind in layer_types)


def _eos_token_ids(model_dir: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    ids = read_generation_config(model_dir).get("eos_token_id")
    ids = values["eos_token_id"] if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise _unsupported("eos_token_id", ids, "must be one or several token ids")
    return tuple(dict.fromkeys(ids))


def _positive(values: Mapping[str, Any], key: str) -> int:
    if _count(values, key) == 0:
        raise _unsupported(key, 0, "must be positive")
    return int(values[key])


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if type(value) is not int or value < 0:
        raise _unsupported(key, value, "must be an integer, not negative")
    return value


def _flag(values: Mapping[str, Any], key: str | bool) -> bool:
    """Returns the value of a key that may be left out, or of a constant."""
    if isinstance(key, bool):
        return key
    value = values.get(key)
    if value not in (None, False, True):
        raise _unsupported(key, value, "must be true or false")
    return bool(value)


def _epsilon(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _unsupported("rms_norm_eps", value, "must be a small number")
    return float(value)


def _unsupported(key: str, value: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"config.json: {key} = {value!r}: {reason}")
