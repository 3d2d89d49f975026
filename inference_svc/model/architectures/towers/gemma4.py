"""Gemma 4's vision tower, which reads pictures of any size: norms on both sides of each half and of
each head's queries, keys and values, rotation by the columns and rows of patches, and positions
that are learned for each. Linear layers may be clipped."""

from __future__ import annotations

from inference_svc.model.architectures.towers.axial import read_theta
from inference_svc.model.architectures.towers.making import make_tower, read_vision
from inference_svc.model.architectures.towers.vit import TOWER, WHERE
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import HEADS, KV_HEADS, MAX_HEADS, ConfigReader
from inference_svc.model.description import (
    Block,
    BothWays,
    Connector,
    Decoder,
    Dense,
    EncoderInputs,
    Member,
    Merging,
    Norm,
    Patches,
    Positions,
    Projection,
    Standard,
)
from inference_svc.model.rope import Axes, Rope
from inference_svc.pictures.processor import CHANNELS
from inference_svc.pictures.sizes import TileForm

MODEL_TYPE = "gemma4_vision"
CONNECTOR = "embed_vision"
MAX_PATCH, MAX_MERGE, MAX_POSITIONS = 128, 16, 1 << 16
TABLE = f"{TOWER}patch_embedder.position_embedding_table"
_STORED = "vision_tower."
# The table of positions is no module of its own.
WRAPPER = Wrapper(
    prefixes=tuple(
        (f"{whole}{part}", meant)
        for whole in ("model.", "")
        for part, meant in (
            (f"{_STORED}{TABLE.removeprefix(TOWER)}", f"{TABLE}.weight"),
            (f"{_STORED}encoder.layers.", "model.layers."),
            (_STORED, TOWER),
            (f"{CONNECTOR}.", f"{CONNECTOR}."),
        )
    ),
    others=("language_model", "lm_head", "audio_tower", "embed_audio"),
)
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    HEADS: 12,
    KV_HEADS: 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_READS = names(
    """
    hidden_activation rms_norm_eps pooling_kernel_size patch_size position_embedding_size
    use_clipped_linears standardize
    """
)
_IGNORES = names("attention_bias global_head_dim default_output_length")


def describe_tower(config: ConfigReader, out_size: int) -> Decoder:
    """Returns the tower that `vision_config` describes, with the connector to embeddings of
    `out_size` elements. Raises UnsupportedModel."""
    vision = read_vision(config, MODEL_TYPE, _READS, _IGNORES, _DEFAULTS, WHERE)
    width = vision.positive("hidden_size")
    num_positions = vision.within("position_embedding_size", 1, MAX_POSITIONS)
    return make_tower(
        width,
        (_block(vision, width),) * vision.num_layers,
        EncoderInputs(None, Positions(TABLE, 2 * num_positions, of_axes=True)),
        _patches(vision, width, num_positions),
        _connector(vision, width, out_size),
        WRAPPER,
    )


def _patches(config: ConfigReader, width: int, num_positions: int) -> Patches:
    patch = config.within("patch_size", 1, MAX_PATCH)
    merge = config.within("pooling_kernel_size", 1, MAX_MERGE)
    module = f"{TOWER}patch_embedder.input_proj"
    layer = Projection("patches", (Member(module, width),), CHANNELS * patch**2)
    form = TileForm(0, patch, merge, most_per_side=num_positions)
    return Patches(module, form, has_bias=False, layer=layer)


def _connector(config: ConfigReader, width: int, out_size: int) -> Connector:
    is_standard = config.flag("standardize")
    tensors = (f"{TOWER}std_bias", f"{TOWER}std_scale") if is_standard else ("", "")
    member = Member(f"{CONNECTOR}.embedding_projection", out_size)
    return Connector(
        (Projection("connector", (member,), width),),
        merging=Merging.MEAN,
        norm=Norm("", width, config.epsilon("rms_norm_eps"), is_wide=True),
        standard=Standard(width**0.5, *tensors),
    )


def _block(config: ConfigReader, width: int) -> Block:
    return Block(
        _attention(config, width),
        _dense(config, width),
        attention_norm=_norm(config, "input_layernorm", width),
        feed_forward_norm=_norm(config, "pre_feedforward_layernorm", width),
        attention_post_norm=_norm(config, "post_attention_layernorm", width),
        feed_forward_post_norm=_norm(config, "post_feedforward_layernorm", width),
    )


def _norm(config: ConfigReader, module: str, size: int) -> Norm:
    return Norm(module, size, config.epsilon("rms_norm_eps"), is_wide=True)


def _attention(config: ConfigReader, width: int) -> BothWays:
    """Half of a head turns by columns, and half by rows: each with elements of its own."""
    num_heads, head_dim = config.within(HEADS, 1, MAX_HEADS), config.positive("head_dim")
    if head_dim % 4:
        raise config.unsupported("head_dim", "must be a multiple of 4")
    if config.positive(KV_HEADS) != num_heads:
        raise config.unsupported(KV_HEADS, f"must be {HEADS}, {num_heads}")
    theta = read_theta(config, config.get("rope_parameters") or {}, 100.0)
    size, pairs = num_heads * head_dim, head_dim // 4
    return BothWays(
        num_heads,
        head_dim,
        1.0,
        _projection(config, "qkv", ("q", "k", "v"), "self_attn", size, width),
        _projection(config, "o", ("o",), "self_attn", width, size),
        Rope(rope_theta=theta, axes=Axes((pairs, pairs), restarts=True)),
        head_norms=(
            _norm(config, "self_attn.q_norm", head_dim),
            _norm(config, "self_attn.k_norm", head_dim),
            _norm(config, "", head_dim),
        ),
        quarters=(2, 0, 3, 1),
    )


def _dense(config: ConfigReader, width: int) -> Dense:
    size = config.positive("intermediate_size")
    return Dense(
        config.activation("hidden_activation"),
        _projection(config, "gate_up", ("gate", "up"), "mlp", size, width),
        _projection(config, "down", ("down",), "mlp", width, size),
    )


def _projection(
    config: ConfigReader, name: str, members: tuple[str, ...], part: str, size: int, in_size: int
) -> Projection:
    return Projection(
        name,
        tuple(Member(f"{part}.{each}_proj.linear", size) for each in members),
        in_size,
        is_clipped=config.flag("use_clipped_linears"),
    )
