"""LFM 2: some layers are attention with norms of each head's queries and keys, the others a short
convolution between two gates. In mixtures, all layers but the first ones have experts that sigmoids
with a bias choose."""

from collections.abc import Iterable, Mapping

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    experts,
    norm,
    rope,
    router,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, ConfigReader
from inference_svc.model.description import (
    Activation,
    Attention,
    Decoder,
    Dense,
    Experts,
    Member,
    Projection,
    Recurrence,
)
from inference_svc.model.mixers.short_conv import ShortConv
from kernels.experts import Choice, Scoring
from kernels.recurrence import MAX_KERNEL

CONV, HALF = "conv", "feed_forward"


def describe(config: ConfigReader) -> Decoder:
    half = _dense(config, _feed_forward_size(config))
    return _describe(config, [half] * config.num_layers)


def describe_moe(config: ConfigReader) -> Decoder:
    first, mixture = config.count("num_dense_layers"), _mixture(config)
    half = _dense(config, config.positive("intermediate_size"))
    every = range(config.num_layers)
    return _describe(config, [half if layer < first else mixture for layer in every])


def _describe(config: ConfigReader, halves: Iterable[Dense | Experts]) -> Decoder:
    for key, meant in _TWICE.items():
        config.require_same(key, meant)
    config = config.with_values(
        rms_norm_eps=config.epsilon("norm_eps"),
        tie_word_embeddings=config.flag(_either(config, "tie_word_embeddings", "tie_embedding")),
    )
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
            half,
            attention_norm=norm(config, "operator_norm"),
            feed_forward_norm=norm(config, "ffn_norm"),
        )
        for kind, half in zip(kinds, halves, strict=True)
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
        rope(config, theta=1e6),
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


def _dense(config: ConfigReader, size: int) -> Dense:
    hidden_size = config.positive("hidden_size")
    members = (Member(f"{HALF}.w1", size), Member(f"{HALF}.w3", size))
    gate_up = Projection("gate_up", members, hidden_size)
    down = Projection("down", (Member(f"{HALF}.w2", hidden_size),), size)
    return Dense(Activation.SILU, gate_up, down)


def _mixture(config: ConfigReader) -> Experts:
    choice = Choice(
        config.positive("num_experts_per_tok"),
        Scoring.SIGMOID,
        normalised=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )
    bias = f"{HALF}.expert_bias" if config.flag("use_expert_bias") else ""
    module = f"{HALF}.experts"
    return experts(
        config,
        router(config, choice, "num_experts", module=f"{HALF}.gate", bias=bias),
        config.positive("moe_intermediate_size"),
        activation=Activation.SILU,
        module=module,
        others=((f"{module}.w1", f"{module}.w3", f"{module}.w2"),),
    )


def _feed_forward_size(config: ConfigReader) -> int:
    """Returns the size, which files give before it is cut to two thirds and rounded up."""
    key = _either(config, "intermediate_size", "block_ff_dim")
    size = config.positive(key)
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = 2 * size // 3
    factor = config.optional("block_ffn_dim_multiplier")
    if factor is not None and factor > MAX_FACTOR:
        raise config.unsupported("block_ffn_dim_multiplier", f"must be at most {MAX_FACTOR}")
    if factor is not None:
        multiple = config.positive("block_multiple_of")
        size = -(-int(factor * size) // multiple) * multiple
    if not size:
        raise config.unsupported(key, "leaves no element once it is cut to two thirds and scaled")
    return size


MAX_FACTOR = 1024.0
_TWICE = {
    "block_dim": "hidden_size",
    "block_norm_eps": "norm_eps",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
}
"""Keys whose value files have under another key, too, which counts."""
_READS = names("norm_eps conv_L_cache full_attn_idxs tie_embedding", *_TWICE)
_IGNORES = names(
    """
    block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init theta
    use_pos_enc
    """
)
_ACCEPTS = {"conv_bias": False, "block_use_swiglu": True}
_DEFAULTS = {
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}

FAMILIES = (
    Family(
        "Lfm2ForCausalLM",
        describe,
        reads=_READS
        | names(
            """
            block_ff_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim
            """
        ),
        ignores=_IGNORES,
        accepts=_ACCEPTS,
        defaults={
            **_DEFAULTS,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    ),
    Family(
        "Lfm2MoeForCausalLM",
        describe_moe,
        reads=_READS
        | names(
            """
            moe_intermediate_size num_dense_layers num_experts num_experts_per_tok
            use_expert_bias routed_scaling_factor norm_topk_prob
            """
        ),
        ignores=_IGNORES | names("output_router_logits"),
        accepts=_ACCEPTS,
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
    ),
)
