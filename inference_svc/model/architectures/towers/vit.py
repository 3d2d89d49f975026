"""Vision towers of the class of CLIP and SigLIP, and the connectors behind them: parts of models
that read pictures, each of a config of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from inference_svc.model.architectures.towers.making import make_tower
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import check_keys, names
from inference_svc.model.config.reader import HEADS, MAX_HEADS, ConfigReader
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
)
from inference_svc.pictures.sizes import TileForm

WHERE = "config.json: vision_config"
TOWER = "tower."
"""The begin of a tower's modules here, whatever a checkpoint calls them."""
MAX_TILE_SIZE = 4096
_ACTIVATIONS = (Activation.GELU, Activation.QUICK_GELU)


class Kind(NamedTuple):
    """A class of towers by transformers' `model_type`: with a token before the patches and a norm
    behind them, as CLIP, or with a bias of patches, as SigLIP; with positions that follow from
    fractions of a side, as Idefics3; and transformers' `defaults`."""

    has_class: bool
    defaults: Mapping[str, Any]
    has_fractions: bool = False


_SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "num_channels": 3,
}
_IDEFICS3 = _SHAPE | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
KINDS = {
    "clip_vision_model": Kind(
        True,
        _SHAPE | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    ),
    "siglip_vision_model": Kind(False, _SHAPE | {"patch_size": 16}),
    "idefics3_vision": Kind(False, _IDEFICS3, has_fractions=True),
}
_READS = names("image_size patch_size hidden_act layer_norm_eps num_channels")
_IGNORES = names(
    """
    projection_dim initializer_factor vision_use_head dropout max_image_size size num_image_tokens
    use_base_siglip
    """
)


def wrapper(tower: str, connector: str, others: tuple[str, ...]) -> Wrapper:
    """Returns how checkpoints name the modules of a `tower` and its `connector`, of transformers'
    releases before 5 and since."""
    found: list[tuple[str, str]] = []
    for whole in ("model.", ""):
        for inner in (f"{tower}.vision_model.", f"{tower}."):
            found.append((f"{whole}{inner}encoder.layers.", "model.layers."))
        for inner in (f"{tower}.vision_model.", f"{tower}."):
            found.append((f"{whole}{inner}", TOWER))
        found.append((f"{whole}{connector}.", f"{connector}."))
    return Wrapper(prefixes=tuple(found), others=others)


def read_vision(config: ConfigReader, kinds: tuple[str, ...]) -> tuple[ConfigReader, Kind]:
    """Returns the reader of `vision_config`, and the class that it is of, one of `kinds`: the first
    if it says none. If there is only one, its `model_type` has no effect, as in transformers.
    Raises UnsupportedModel."""
    values = config.get("vision_config")
    if not isinstance(values, Mapping):
        raise config.unsupported("vision_config", "must describe the vision tower")
    name = (values.get("model_type") if len(kinds) > 1 else None) or kinds[0]
    if name not in kinds:
        reason = f"supported are {', '.join(kinds)}; --max-prompt-images 0 serves the text alone"
        raise config.unsupported("vision_config.model_type", reason, name)
    check_keys(values, str(name), _READS, _IGNORES, {}, WHERE)
    kind = KINDS[name]
    return ConfigReader(values, kind.defaults, WHERE), kind


def feature_layer(config: ConfigReader, num_layers: int) -> int:
    """Returns the number of the layer, counted from 1, whose outputs the connector reads. Raises
    UnsupportedModel."""
    layer = config.get("vision_feature_layer")
    if (
        type(layer) is not int
        or not -num_layers <= layer <= num_layers
        or layer in (0, -1 - num_layers)
    ):
        raise config.unsupported("vision_feature_layer", "must be the number of one layer")
    return layer if layer > 0 else num_layers + 1 + layer


def describe_tower(
    config: ConfigReader,
    kind: Kind,
    connector: Connector,
    wrapper: Wrapper,
    *,
    num_layers: int,
    merge: int = 1,
    num_dropped: int = 0,
    has_last_norm: bool = False,
) -> Decoder:
    """Returns a tower of its first `num_layers`. The connector reads all tokens of a tile but the
    first `num_dropped`, `merge` x `merge` patches as one. Raises UnsupportedModel."""
    patches = _patches(config, kind, merge, num_dropped)
    num_tokens = patches.form.inner_tokens(patches.form.whole)
    first_norm = _norm(config, f"{TOWER}pre_layrnorm") if kind.has_class else None
    last_norm = _norm(config, f"{TOWER}post_layernorm") if has_last_norm else None
    unused = [f"{TOWER}head.", f"{TOWER}embeddings.position_ids"]
    unused += [] if has_last_norm else [f"{TOWER}post_layernorm."]
    block = Block(
        _attention(config),
        _dense(config),
        _norm(config, "layer_norm1"),
        _norm(config, "layer_norm2"),
    )
    return make_tower(
        config.positive("hidden_size"),
        (block,) * num_layers,
        EncoderInputs(
            first_norm,
            Positions(f"{TOWER}embeddings.position_embedding", num_tokens),
            unused=tuple(unused),
        ),
        patches,
        connector,
        wrapper,
        final_norm=last_norm,
        most_tokens=num_tokens,
        num_unused_layers=config.num_layers - num_layers,
    )


def _patches(config: ConfigReader, kind: Kind, merge: int, num_dropped: int) -> Patches:
    if config.get("num_channels") != 3:
        raise config.unsupported("num_channels", "must be 3")
    tile_size = config.within("image_size", 1, MAX_TILE_SIZE)
    patch_size = config.within("patch_size", 1, tile_size)
    if tile_size // patch_size % merge:
        reason = f"must be {merge} times a number of patches each side"
        raise config.unsupported("image_size", reason)
    return Patches(
        f"{TOWER}embeddings.patch_embedding",
        TileForm(tile_size, patch_size, merge, int(kind.has_class), num_dropped),
        has_bias=not kind.has_class,
        class_token=f"{TOWER}embeddings.class_embedding" if kind.has_class else "",
        has_fractions=kind.has_fractions,
    )


def _norm(config: ConfigReader, module: str) -> Norm:
    size, eps = config.positive("hidden_size"), config.epsilon("layer_norm_eps")
    return Norm(module, size, eps, NormKind.LAYER, is_wide=True, has_bias=True)


def _attention(config: ConfigReader) -> BothWays:
    hidden_size, num_heads = config.positive("hidden_size"), config.within(HEADS, 1, MAX_HEADS)
    if hidden_size % num_heads:
        raise config.unsupported("hidden_size", f"not a multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads
    members = tuple(Member(f"self_attn.{name}_proj", hidden_size) for name in "qkv")
    out = Member("self_attn.out_proj", hidden_size)
    return BothWays(
        num_heads,
        head_dim,
        head_dim**-0.5,
        Projection("qkv", members, hidden_size, has_bias=True),
        Projection("o", (out,), hidden_size, has_bias=True),
    )


def _dense(config: ConfigReader) -> Dense:
    hidden_size, size = config.positive("hidden_size"), config.positive("intermediate_size")
    return Dense(
        config.activation(also=_ACTIVATIONS),
        Projection("gate_up", (Member("mlp.fc1", size),), hidden_size, has_bias=True),
        Projection("down", (Member("mlp.fc2", hidden_size),), size, has_bias=True),
        is_gated=False,
    )
