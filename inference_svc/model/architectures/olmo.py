"""OLMo 2 and 3: a norm after each half and none before it, and norms of all queries and of all
keys; OLMo 3 has windows in three of four layers. OLMoE: norms of all queries and of all keys, norms
before each half, and experts."""

from dataclasses import replace
from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    experts,
    norm,
    rope,
    rope_facts,
    rope_of_kind,
    router,
    with_windows,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, HEADS, ConfigReader, every_full
from inference_svc.model.description import Attention, Block, Decoder
from inference_svc.model.rope import Rope, parse_parameters
from kernels.experts import Choice

_norm = partial(norm, is_wide=True)


def describe_olmo2(config: ConfigReader) -> Decoder:
    mixer = _attention(config, rope(config))
    windows = config.same_window(None)
    return _decoder(config, tuple(replace(mixer, window=window) for window in windows))


def describe_olmo3(config: ConfigReader) -> Decoder:
    types = config.layer_types(every_full(4))
    ropes = {kind: _rope_of(config, kind) for kind in dict.fromkeys(types)}
    mixers = (
        replace(_attention(config, ropes[kind]), window=window)
        for kind, window in zip(types, config.windows(types), strict=True)
    )
    return _decoder(config, tuple(mixers))


def describe_olmoe(config: ConfigReader) -> Decoder:
    choice = Choice(
        config.positive("num_experts_per_tok"), normalised=config.flag("norm_topk_prob")
    )
    count = config.name_of("num_experts", "num_local_experts")
    size = config.positive("intermediate_size")
    mixture = experts(config, router(config, choice, count), size)
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    mixer = attention(
        config,
        rope(config),
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_norm=norm(config, "self_attn.q_norm", config.positive(HEADS) * head_dim),
        k_norm=norm(config, "self_attn.k_norm", config.num_kv_heads * head_dim),
    )
    layer = block(config, mixer, mixture)
    return decoder(config, with_windows(layer, config.same_window(None)))


def _rope_of(config: ConfigReader, kind: str) -> Rope:
    """Returns the rotation of layers of this kind. In older files `rope_scaling` is full
    attention's alone."""
    facts = rope_facts(config, theta=500_000.0)

    def older() -> Rope:
        values = config.get("rope_scaling") or {} if kind == FULL else {}
        given = {"rope_theta": config.get("rope_theta")}
        return parse_parameters(values, "rope_scaling", given, facts)

    return rope_of_kind(config, kind, facts, older)


def _attention(config: ConfigReader, rope: Rope) -> Attention:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    return attention(
        config,
        rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_norm=_norm(config, "self_attn.q_norm", config.positive(HEADS) * head_dim),
        k_norm=_norm(config, "self_attn.k_norm", config.num_kv_heads * head_dim),
    )


def _decoder(config: ConfigReader, mixers: tuple[Attention, ...]) -> Decoder:
    feed_forward = dense(config)

    def layer(mixer: Attention) -> Block:
        return block(
            config,
            mixer,
            feed_forward,
            attention_norm=None,
            attention_post_norm=_norm(config, "post_attention_layernorm"),
            feed_forward_norm=None,
            feed_forward_post_norm=_norm(config, "post_feedforward_layernorm"),
        )

    return decoder(config, tuple(map(layer, mixers)), final_norm=_norm(config, "model.norm"))


_READS = names("hidden_act rms_norm_eps attention_bias")
_DEFAULTS = {"vocab_size": 50304, "eos_token_id": 50279, "rms_norm_eps": 1e-5}

FAMILIES = (
    Family("Olmo2ForCausalLM", describe_olmo2, reads=_READS, defaults=_DEFAULTS),
    Family(
        "Olmo3ForCausalLM",
        describe_olmo3,
        reads=_READS | {"sliding_window"},
        defaults={**_DEFAULTS, "sliding_window": 4096},
    ),
    Family(
        "OlmoeForCausalLM",
        describe_olmoe,
        reads=_READS | names("num_experts num_local_experts num_experts_per_tok norm_topk_prob"),
        ignores=names("output_router_logits"),
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            HEADS: 16,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
)
