"""Vision towers of Qwen 2 VL and its successors, and the mergers behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from inference_svc.model.architectures.towers.axial import read_heads, read_theta
from inference_svc.model.architectures.towers.making import make_tower
from inference_svc.model.architectures.towers.vit import TOWER, WHERE
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import check_keys, names
from inference_svc.model.config.reader import MAX_LAYERS, ConfigReader
from inference_svc.model.description import (
    Activation,
    Block,
    BothWays,
    Connector,
    Decoder,
    Dense,
    EncoderInputs,
    Member,
    Norm,
    NormKind,
    Patches,
    Positions,
    Projection,
    Tap,
)
from inference_svc.model.rope import Axes, Rope
from inference_svc.pictures.sizes import MAX_SLICE, TileForm

MERGER, TAPS = "merger", "deepstack_merger_list"
MAX_PATCH, MAX_MERGE, MAX_FRAMES, MAX_SIDE = 128, 8, 8, 1024
EPS = 1e-6
"""The epsilon of all norms, whatever a config says."""
_TEXT = ("language_model", "lm_head", "layers", "embed_tokens", "norm", "mtp")
WRAPPER = Wrapper(
    prefixes=tuple(
        (f"{whole}visual.{part}", meant)
        for whole in ("model.", "")
        for part, meant in (
            ("blocks.", "model.layers."),
            (f"{MERGER}.", f"{MERGER}."),
            (f"{TAPS}.", f"{TAPS}."),
            ("", TOWER),
        )
    ),
    others=_TEXT,
)


class Kind(NamedTuple):
    """A class of towers: the keys of its width and of its outputs' width; transformers' `defaults`;
    the modules of feed-forward halves; and of the merger its norm and its layers. `has_windows`:
    some layers attend within windows, and norms are RMSNorms. `has_table`: patches have a bias, and
    positions that are learned."""

    width: str
    out: str
    defaults: Mapping[str, Any]
    half: tuple[str, ...]
    merger_norm: str
    merger: tuple[str, str]
    has_windows: bool = False
    has_table: bool = False


_SHAPE = {
    "num_heads": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_BEFORE_3 = _SHAPE | {"depth": 32, "patch_size": 14, "hidden_size": 3584}
QWEN2 = Kind(
    "embed_dim",
    "hidden_size",
    _BEFORE_3 | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    ("mlp.fc1", "mlp.fc2"),
    "ln_q",
    ("mlp.0", "mlp.2"),
)
QWEN2_5 = Kind(
    "hidden_size",
    "out_hidden_size",
    _BEFORE_3
    | {
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "ln_q",
    ("mlp.0", "mlp.2"),
    has_windows=True,
)
QWEN3_5 = Kind(
    "hidden_size",
    "out_hidden_size",
    _SHAPE
    | {
        "depth": 27,
        "patch_size": 16,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
    },
    ("mlp.linear_fc1", "mlp.linear_fc2"),
    "norm",
    ("linear_fc1", "linear_fc2"),
    has_table=True,
)
QWEN3 = QWEN3_5._replace(
    defaults={**QWEN3_5.defaults, "deepstack_visual_indexes": [8, 16, 24]},
)
_READS = names(
    """
    depth num_heads in_channels patch_size spatial_merge_size temporal_patch_size hidden_act
    rope_parameters
    """
)
_OF_KINDS = names(
    """
    embed_dim mlp_ratio out_hidden_size window_size fullatt_block_indexes num_position_embeddings
    deepstack_visual_indexes
    """
)
_IGNORES = names("in_chans spatial_patch_size tokens_per_second")


def describe_tower(config: ConfigReader, kind: Kind) -> Decoder:
    """Returns the tower that `vision_config` describes. Raises UnsupportedModel."""
    values = config.get("vision_config")
    if not isinstance(values, Mapping):
        raise config.unsupported("vision_config", "must describe the vision tower")
    reads = _READS | (_OF_KINDS & kind.defaults.keys())
    check_keys(values, "this tower", reads, _IGNORES, {"deepstack_visual_indexes": []}, WHERE)
    vision = ConfigReader(values, kind.defaults, WHERE)
    out_size = vision.positive(kind.out)
    width, form = vision.positive(kind.width), _form(vision, kind)
    mixer, half = _attention(vision, width), _dense(vision, kind, width)
    num_layers = _num_layers(vision)
    full = _layers(vision, "fullatt_block_indexes") if kind.has_windows else range(num_layers)
    blocks = (
        Block(
            mixer if layer in full else replace(mixer, in_windows=True),
            half,
            _norm(kind, "norm1", width),
            _norm(kind, "norm2", width),
        )
        for layer in range(num_layers)
    )
    return make_tower(
        width,
        tuple(blocks),
        _inputs(vision, kind),
        Patches(f"{TOWER}patch_embed.proj", form, has_bias=kind.has_table),
        _merger(kind, MERGER, "", width * form.merge**2, out_size),
        WRAPPER,
        final_norm=_norm(kind, f"{MERGER}.{kind.merger_norm}", width),
        taps=_taps(vision, kind, width * form.merge**2, out_size),
    )


def _form(config: ConfigReader, kind: Kind) -> TileForm:
    if config.get("in_channels") != 3:
        raise config.unsupported("in_channels", "must be 3")
    patch, merge = (
        config.within(key, 1, most)
        for key, most in (("patch_size", MAX_PATCH), ("spatial_merge_size", MAX_MERGE))
    )
    window = 0
    if kind.has_windows:
        window = config.positive("window_size") // merge // patch
        if not 0 < (window * merge) ** 2 <= MAX_SLICE:
            reason = f"a window must have 1 to {MAX_SLICE} patches"
            raise config.unsupported("window_size", reason)
    frames = config.within("temporal_patch_size", 1, MAX_FRAMES)
    return TileForm(0, patch, merge, frames=frames, window=window)


def _num_layers(config: ConfigReader) -> int:
    return config.within("depth", 1, MAX_LAYERS)


def _layers(config: ConfigReader, key: str) -> tuple[int, ...]:
    """Returns the layers that a key lists, in order."""
    value, num_layers = config.get(key), _num_layers(config)
    is_list = isinstance(value, list) and all(type(each) is int for each in value)
    if not is_list or len(set(value)) < len(value):
        raise config.unsupported(key, "must list layers, each once")
    if not all(0 <= each < num_layers for each in value):
        raise config.unsupported(key, f"layers must be 0 to {num_layers - 1}")
    return tuple(value)


def _norm(kind: Kind, module: str, size: int) -> Norm:
    if kind.has_windows:
        return Norm(module, size, EPS)
    return Norm(module, size, EPS, NormKind.LAYER, is_wide=True, has_bias=True)


def _inputs(config: ConfigReader, kind: Kind) -> EncoderInputs:
    """Returns the learned positions: a square of them, which is blended for a tile's grid."""
    if not kind.has_table:
        return EncoderInputs(None)
    count = config.within("num_position_embeddings", 1, MAX_SIDE**2)
    side = math.isqrt(count)
    if side**2 != count:
        raise config.unsupported("num_position_embeddings", "must be a square")
    return EncoderInputs(None, Positions(f"{TOWER}pos_embed", count, side=side))


def _attention(config: ConfigReader, width: int) -> BothWays:
    num_heads, head_dim = read_heads(config, "num_heads", width)
    theta = read_theta(config, config.get("rope_parameters") or {})
    pairs = head_dim // 4
    return BothWays(
        num_heads,
        head_dim,
        head_dim**-0.5,
        Projection("qkv", (Member("attn.qkv", 3 * width),), width, has_bias=True),
        Projection("o", (Member("attn.proj", width),), width, has_bias=True),
        Rope(rope_theta=theta, axes=Axes((pairs, pairs), restarts=True)),
    )


def _dense(config: ConfigReader, kind: Kind, width: int) -> Dense:
    if "mlp_ratio" in kind.defaults:
        size = width * config.positive("mlp_ratio")
    else:
        size = config.positive("intermediate_size")
    *into, out = kind.half
    is_gated = len(into) > 1
    others = () if is_gated else (Activation.GELU, Activation.QUICK_GELU)
    return Dense(
        config.activation(also=others),
        Projection("gate_up", tuple(Member(each, size) for each in into), width, has_bias=True),
        Projection("down", (Member(out, width),), size, has_bias=True),
        is_gated=is_gated,
    )


def _merger(kind: Kind, module: str, suffix: str, size: int, out_size: int) -> Connector:
    sizes = zip(kind.merger, (size, out_size), strict=True)
    layers = tuple(
        Projection(f"connector{suffix}_{index}", (Member(f"{module}.{name}", out),), size, True)
        for index, (name, out) in enumerate(sizes)
    )
    return Connector(layers, Activation.GELU)


def _taps(config: ConfigReader, kind: Kind, size: int, out_size: int) -> tuple[Tap, ...]:
    """Returns the mergers behind some of the layers, each with a norm of whole cells, in order of
    layers: the text adds their outputs in this order, wherever the config lists them."""
    if "deepstack_visual_indexes" not in kind.defaults:
        return ()
    layers = _layers(config, "deepstack_visual_indexes")
    return tuple(
        Tap(
            layer,
            _norm(kind, f"{TAPS}.{index}.{kind.merger_norm}", size),
            _merger(kind, f"{TAPS}.{index}", f"_{index}", size, out_size),
        )
        for layer, index in sorted((layer, index) for index, layer in enumerate(layers))
    )
