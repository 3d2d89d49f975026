"""Gemma 2 and 3: norms on both sides of each half, whose weights are offsets from 1; windows in
most layers; scaled embeddings. Gemma 2 bounds scores and logits. Gemma 3 has norms of queries and
keys, and RoPE parameters of its own in layers with windows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    norm,
    rope,
    rope_facts,
    rope_of_kind,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, SLIDING, ConfigReader, every_full
from inference_svc.model.description import Attention, Block, Decoder, Head
from inference_svc.model.rope import Rope, parse_parameters

_norm = partial(norm, weight_offset=1.0, is_wide=True)


def describe_gemma2(config: ConfigReader) -> Decoder:
    config.require_same("sliding_window_size", "sliding_window")
    has_bias = config.flag("attention_bias")
    mixer = attention(
        config,
        rope(config),
        qkv_bias=has_bias,
        out_bias=has_bias,
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=config.optional("attn_logit_softcapping"),
    )
    types = config.layer_types(lambda layer: FULL if layer % 2 else SLIDING)
    mixers = [replace(mixer, window=window) for window in config.windows(types)]
    return _decoder(config, mixers)


def describe_gemma3(config: ConfigReader) -> Decoder:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    types = config.layer_types(every_full(config.positive("sliding_window_pattern")))
    ropes = {kind: _rope_of(config, kind) for kind in dict.fromkeys(types)}
    mixers = [
        attention(
            config,
            ropes[kind],
            qkv_bias=has_bias,
            out_bias=has_bias,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            softcap=config.optional("attn_logit_softcapping"),
            q_norm=_norm(config, "self_attn.q_norm", head_dim),
            k_norm=_norm(config, "self_attn.k_norm", head_dim),
            window=window,
        )
        for kind, window in zip(types, config.windows(types), strict=True)
    ]
    return _decoder(config, mixers)


def _rope_of(config: ConfigReader, kind: str) -> Rope:
    """Returns the rotation of layers of this kind. Older files have the parameters of full
    attention beside each other, and the base under windows in `rope_local_base_freq`."""
    facts = rope_facts(config, theta=1e6 if kind == FULL else 1e4)

    def older() -> Rope:
        if kind == SLIDING:
            return Rope(rope_theta=config.number("rope_local_base_freq"))
        given = {"rope_theta": config.get("rope_theta")}
        return parse_parameters(config.get("rope_scaling") or {}, "rope_scaling", given, facts)

    return rope_of_kind(config, kind, facts, older)


def _decoder(config: ConfigReader, mixers: Sequence[Attention]) -> Decoder:
    feed_forward = dense(config, activation="hidden_activation")
    head = Head(
        config.flag("tie_word_embeddings"), softcap=config.optional("final_logit_softcapping")
    )

    def layer(mixer: Attention) -> Block:
        return block(
            config,
            mixer,
            feed_forward,
            attention_norm=_norm(config, "input_layernorm"),
            attention_post_norm=_norm(config, "post_attention_layernorm"),
            feed_forward_norm=_norm(config, "pre_feedforward_layernorm"),
            feed_forward_post_norm=_norm(config, "post_feedforward_layernorm"),
        )

    return decoder(
        config,
        tuple(map(layer, mixers)),
        final_norm=_norm(config, "model.norm"),
        head=head,
        embedding_scale=config.positive("hidden_size") ** 0.5,
    )


_READS = names(
    """
    rms_norm_eps hidden_activation attention_bias query_pre_attn_scalar sliding_window
    attn_logit_softcapping final_logit_softcapping
    """
)
_IGNORES = names("hidden_act cache_implementation")
# `hidden_act` is a key of older files beside `hidden_activation`, which counts.
_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = (
    Family(
        "Gemma2ForCausalLM",
        describe_gemma2,
        reads=_READS | {"sliding_window_size"},
        ignores=_IGNORES,
        defaults={
            **_DEFAULTS,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
    ),
    Family(
        "Gemma3ForCausalLM",
        describe_gemma3,
        reads=_READS | names("sliding_window_pattern rope_local_base_freq"),
        ignores=_IGNORES,
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
        },
    ),
)
