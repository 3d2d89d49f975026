"""Qwen 2 and 3: Llama with biases of q, k and v, or with norms of each head's queries and keys;
some layers may attend to a window. Mixtures of experts have a dense half in some layers; Qwen 2's
also have a shared expert with a gate."""

from collections.abc import Sequence
from dataclasses import replace

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    dense_layers,
    experts,
    norm,
    rope,
    router,
    with_experts,
    with_windows,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, SLIDING, ConfigReader
from inference_svc.model.description import Attention, Decoder, Experts, Member, Projection
from inference_svc.model.rope import Rope
from kernels.experts import Choice


def describe_qwen2(config: ConfigReader) -> Decoder:
    return _describe(config, attention(config, rope(config), qkv_bias=True))


def describe_qwen2_vl(config: ConfigReader) -> Decoder:
    turned = rope(config, theta=1_000_000.0, kinds=_MROPE, other_keys=_OF_IMAGES)
    return _describe(config, attention(config, turned, qkv_bias=True))


def describe_qwen2_moe(config: ConfigReader) -> Decoder:
    size = config.positive("shared_expert_intermediate_size")
    gate = Member("mlp.shared_expert_gate", 1)
    mixture = replace(
        _mixture(config),
        shared=dense(config, module="mlp.shared_expert", size=size),
        shared_gate=Projection("shared_gate", (gate,), config.positive("hidden_size")),
    )
    # The key that newer files have is true where it is left out.
    has_bias = config.get("qkv_bias") is None or config.flag("qkv_bias")
    mixer = attention(config, rope(config), qkv_bias=has_bias)
    return _describe_mixture(config, mixer, mixture, _windows(config))


def describe_qwen3(config: ConfigReader) -> Decoder:
    return _describe(config, _qwen3_attention(config, rope(config)))


def describe_qwen3_vl(config: ConfigReader) -> Decoder:
    turned = rope(config, theta=500_000.0, kinds=_MROPE, other_keys=_OF_IMAGES)
    return _describe(config, _qwen3_attention(config, turned))


def describe_qwen3_vl_moe(config: ConfigReader) -> Decoder:
    """Published files have the weights of experts transposed, and others may."""
    turned = rope(config, theta=500_000.0, kinds=_MROPE, other_keys=_OF_IMAGES)
    mixture = _mixture(config.with_values(norm_topk_prob=True))
    mixture = replace(
        mixture,
        gate_up=replace(mixture.gate_up, may_be_transposed=True),
        down=replace(mixture.down, may_be_transposed=True),
    )
    mixer, windows = _qwen3_attention(config, turned), config.same_window(None)
    return _describe_mixture(config, mixer, mixture, windows)


def describe_qwen3_moe(config: ConfigReader) -> Decoder:
    window = config.window if config.flag("use_sliding_window") else None
    mixer = _qwen3_attention(config, rope(config))
    return _describe_mixture(config, mixer, _mixture(config), config.same_window(window))


def _qwen3_attention(config: ConfigReader, rope: Rope) -> Attention:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    return attention(
        config,
        rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_norm=norm(config, "self_attn.q_norm", head_dim),
        k_norm=norm(config, "self_attn.k_norm", head_dim),
    )


def _mixture(config: ConfigReader) -> Experts:
    choice = Choice(
        config.positive("num_experts_per_tok"), normalised=config.flag("norm_topk_prob")
    )
    size = config.positive("moe_intermediate_size")
    count = config.name_of("num_experts", "num_local_experts")
    return experts(config, router(config, choice, count), size)


def _describe_mixture(
    config: ConfigReader, mixer: Attention, mixture: Experts, windows: Sequence[int | None]
) -> Decoder:
    mixers = (replace(mixer, window=window) for window in windows)
    return decoder(config, with_experts(config, mixers, mixture, dense_layers(config)))


def _describe(config: ConfigReader, mixer: Attention) -> Decoder:
    layer = block(config, mixer, dense(config))
    return decoder(config, with_windows(layer, _windows(config)))


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """If `use_sliding_window`, `layer_types` says which layers have one, or else those from
    `max_window_layers` on do."""
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return config.same_window(None)
    first = config.count("max_window_layers")
    types = config.layer_types(lambda layer: SLIDING if layer >= first else FULL)
    return config.windows(types)


_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images turn; the ones of text turn as in Llama."""
_MROPE = {"mrope": "default"}
_READS = names("hidden_act rms_norm_eps use_sliding_window sliding_window max_window_layers")
_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_READS_MOE = names(
    """
    moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob
    decoder_sparse_step mlp_only_layers
    """
)
_IGNORES_MOE = names("output_router_logits")
_DEFAULTS_MOE = {"hidden_size": 2048, "decoder_sparse_step": 1}

OF_QWEN2_VL = Family(
    "Qwen2VLTextModel",
    describe_qwen2_vl,
    reads=_READS,
    defaults={
        **_DEFAULTS,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
        "eos_token_id": 151645,
    },
)
OF_QWEN3_VL = Family(
    "Qwen3VLTextModel",
    describe_qwen3_vl,
    reads=names("hidden_act rms_norm_eps attention_bias"),
    accepts={"use_sliding_window": False},
    defaults={**_DEFAULTS, "head_dim": 128, "max_position_embeddings": 128000},
)
OF_QWEN3_VL_MOE = Family(
    "Qwen3VLMoeTextModel",
    describe_qwen3_vl_moe,
    reads=names("hidden_act rms_norm_eps attention_bias") | (_READS_MOE - {"norm_topk_prob"}),
    ignores=_IGNORES_MOE,
    accepts={"use_sliding_window": False, "norm_topk_prob": True},
    defaults={
        **_DEFAULTS,
        **_DEFAULTS_MOE,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "max_position_embeddings": 128000,
    },
)
"""The text parts of models that read pictures."""

FAMILIES = (
    Family("Qwen2ForCausalLM", describe_qwen2, reads=_READS, defaults=_DEFAULTS),
    Family(
        "Qwen3ForCausalLM",
        describe_qwen3,
        reads=_READS | {"attention_bias"},
        defaults={**_DEFAULTS, "head_dim": 128},
    ),
    Family(
        "Qwen2MoeForCausalLM",
        describe_qwen2_moe,
        reads=_READS | _READS_MOE | names("shared_expert_intermediate_size qkv_bias"),
        ignores=_IGNORES_MOE,
        defaults={
            **_DEFAULTS,
            **_DEFAULTS_MOE,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
    ),
    Family(
        "Qwen3MoeForCausalLM",
        describe_qwen3_moe,
        reads=_READS | _READS_MOE | {"attention_bias"},
        ignores=_IGNORES_MOE,
        defaults={
            **_DEFAULTS,
            **_DEFAULTS_MOE,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
    ),
)
