"""Pixtral's vision tower, which reads pictures of any size: RMSNorms, rotation by the rows and
columns of patches, and no biases."""

from __future__ import annotations

from inference_svc.model.architectures.towers import making
from inference_svc.model.architectures.towers.axial import read_heads, read_theta
from inference_svc.model.architectures.towers.making import make_tower
from inference_svc.model.architectures.towers.vit import TOWER, WHERE
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import HEADS, ConfigReader
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
    Patches,
    Projection,
)
from inference_svc.model.rope import Axes, Rope
from inference_svc.pictures.sizes import TileForm

MODEL_TYPE = "pixtral"
EPS = 1e-5
"""The epsilon of all norms, whatever a config says."""
MAX_PATCH = 128
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_READS = names("num_channels patch_size hidden_act")
_IGNORES = names("image_size")


def wrapper(tower: str, connector: str, others: tuple[str, ...]) -> Wrapper:
    """Returns how checkpoints name the modules of a `tower` and its `connector`, of transformers'
    releases before 5 and since."""
    return Wrapper(
        prefixes=tuple(
            (f"{whole}{part}", meant)
            for whole in ("model.", "")
            for part, meant in (
                (f"{tower}.transformer.layers.", "model.layers."),
                (f"{tower}.", TOWER),
                (f"{connector}.", f"{connector}."),
            )
        ),
        others=others,
    )


def read_vision(config: ConfigReader) -> ConfigReader:
    """Returns the reader of `vision_config`. Raises UnsupportedModel."""
    return making.read_vision(config, MODEL_TYPE, _READS, _IGNORES, _DEFAULTS, WHERE)


def describe_tower(
    config: ConfigReader,
    connector: Connector,
    wrapper: Wrapper,
    last_norm: Norm,
    *,
    num_layers: int,
    merge: int,
) -> Decoder:
    """Returns a tower of its first `num_layers`, whose outputs the `last_norm` norms. Cells have
    `merge` x `merge` patches. Raises UnsupportedModel."""
    if config.get("num_channels") != 3:
        raise config.unsupported("num_channels", "must be 3")
    form = TileForm(0, config.within("patch_size", 1, MAX_PATCH), merge)
    width = config.positive("hidden_size")
    block = Block(
        _attention(config, width),
        _dense(config, width),
        Norm("attention_norm", width, EPS),
        Norm("ffn_norm", width, EPS),
    )
    return make_tower(
        width,
        (block,) * num_layers,
        EncoderInputs(Norm(f"{TOWER}ln_pre", width, EPS)),
        Patches(f"{TOWER}patch_conv", form, has_bias=False),
        connector,
        wrapper,
        final_norm=last_norm,
        num_unused_layers=config.num_layers - num_layers,
    )


def _attention(config: ConfigReader, width: int) -> BothWays:
    num_heads, head_dim = read_heads(config, HEADS, width)
    if config.get("head_dim") not in (None, head_dim):
        raise config.unsupported("head_dim", f"must be {head_dim}")
    theta = read_theta(config, config.get("rope_parameters") or config.given)
    pairs = head_dim // 4
    members = tuple(Member(f"attention.{name}_proj", width) for name in "qkv")
    return BothWays(
        num_heads,
        head_dim,
        head_dim**-0.5,
        Projection("qkv", members, width),
        Projection("o", (Member("attention.o_proj", width),), width),
        Rope(rope_theta=theta, axes=Axes((pairs, pairs), takes_turns=True)),
    )


def _dense(config: ConfigReader, width: int) -> Dense:
    size = config.positive("intermediate_size")
    halves = tuple(Member(f"feed_forward.{name}_proj", size) for name in ("gate", "up"))
    return Dense(
        config.activation(also=(Activation.GELU,)),
        Projection("gate_up", halves, width),
        Projection("down", (Member("feed_forward.down_proj", width),), size),
    )
