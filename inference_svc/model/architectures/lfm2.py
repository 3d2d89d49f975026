"""LFM 2: some layers are attention with norms of each head's queries and keys, the others a short
convolution between two gates."""

from collections.abc import Mapping

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, norm, rope
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, ConfigReader
from inference_svc.model.description import (
    Activation,
    Attention,
    Decoder,
    Dense,
    Member,
    Projection,
    Recurrence,
)
from inference_svc.model.mixers.short_conv import ShortConv
from kernels.recurrence import MAX_KERNEL

CONV = "conv"


def describe(config: ConfigReader) -> Decoder:
    config = config.with_values(
        rms_norm_eps=config.epsilon("norm_eps"),
        tie_word_embeddings=config.flag(_either(config, "tie_word_embeddings", "tie_embedding")),
    )
    if config.get("rope_theta") is None and config.get("rope_parameters") is None:
        config = config.with_values(rope_theta=1_000_000.0)
    kinds = _layer_types(config)
    config.require_attention(kinds)
    mixers: Mapping[str, Attention | Recurrence] = {
        FULL: _attention(config),
        CONV: _short_conv(config),
    }
    blocks = tuple(
        block(
            config,
            mixers[kind],
            _dense(config),
            attention_norm=norm(config, "operator_norm"),
            feed_forward_norm=norm(config, "ffn_norm"),
        )
        for kind in kinds
    )
    return decoder(config, blocks, final_norm=norm(config, "model.embedding_norm"))


def _either(config: ConfigReader, key: str, older: str) -> str:
    """Returns the older name of a key if config.json has it, as transformers prefers."""
    return key if config.get(older) is None else older


def _layer_types(config: ConfigReader) -> tuple[str, ...]:
    listed = config.get("full_attn_idxs")
    if listed is not None and (
        not isinstance(listed, list) or not all(type(each) is int for each in listed)
    ):
        raise config.unsupported("full_attn_idxs", "must be a list of layers")
    every = range(config.num_layers) if listed is None else listed
    return config.layer_types(lambda layer: FULL if layer in every else CONV, (FULL, CONV))


def _attention(config: ConfigReader) -> Attention:
    head_dim, hidden_size = config.head_dim, config.positive("hidden_size")
    size = config.positive("num_attention_heads") * head_dim
    return attention(
        config,
        rope(config),
        out=Projection("o", (Member("self_attn.out_proj", hidden_size),), size),
        q_norm=norm(config, "self_attn.q_layernorm", head_dim),
        k_norm=norm(config, "self_attn.k_layernorm", head_dim),
    )


def _short_conv(config: ConfigReader) -> ShortConv:
    hidden_size = config.positive("hidden_size")
    return ShortConv(
        out=Projection("o", (Member("conv.out_proj", hidden_size),), hidden_size),
        into=Projection("conv_in", (Member("conv.in_proj", 3 * hidden_size),), hidden_size),
        kernel_size=config.within("conv_L_cache", 2, MAX_KERNEL),
        conv="conv.conv.weight",
    )


def _dense(config: ConfigReader) -> Dense:
    hidden_size, size = config.positive("hidden_size"), _feed_forward_size(config)
    members = (Member("feed_forward.w1", size), Member("feed_forward.w3", size))
    gate_up = Projection("gate_up", members, hidden_size)
    down = Projection("down", (Member("feed_forward.w2", hidden_size),), size)
    return Dense(Activation.SILU, gate_up, down)


def _feed_forward_size(config: ConfigReader) -> int:
    """Returns the size, which files give before it is cut to two thirds and rounded up."""
    size = config.positive(_either(config, "intermediate_size", "block_ff_dim"))
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = 2 * size // 3
    factor = config.optional("block_ffn_dim_multiplier")
    if factor is None:
        return size
    multiple = config.positive("block_multiple_of")
    return -(-int(factor * size) // multiple) * multiple


FAMILIES = (
    Family(
        "Lfm2ForCausalLM",
        describe,
        reads=names(
            """
            norm_eps conv_L_cache full_attn_idxs tie_embedding block_ff_dim block_multiple_of
            block_ffn_dim_multiplier block_auto_adjust_ff_dim
            """
        ),
        ignores=names(
            """
            block_dim block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_dim
            conv_dim_out conv_use_xavier_init block_norm_eps num_heads theta use_pos_enc
            """
        ),
        accepts={"conv_bias": False, "block_use_swiglu": True},
        defaults={
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    ),
)
