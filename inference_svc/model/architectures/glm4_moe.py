"""GLM 4.5 to 4.7: RoPE on half of each head, and in some models norms of queries and keys. The
first layers are dense. The others have a shared expert, and experts that sigmoids with a bias
choose, in groups. Layers after the last one predict further tokens; the server does not use them.
"""

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    decoder,
    dense,
    experts,
    norm,
    rope,
    router,
    with_experts,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import HEADS, KV_HEADS, MAX_LAYERS, ConfigReader
from inference_svc.model.description import Decoder, Experts
from kernels.experts import Choice, Scoring

_FURTHER = "num_nextn_predict_layers"


def describe(config: ConfigReader) -> Decoder:
    head_dim = config.head_dim
    q_norm, k_norm = (
        norm(config, f"self_attn.{each}_norm", head_dim) if config.flag("use_qk_norm") else None
        for each in "qk"
    )
    mixer = attention(
        config,
        rope(config, part=0.5),
        qkv_bias=config.flag("attention_bias"),
        q_norm=q_norm,
        k_norm=k_norm,
    )
    mixers = [mixer] * config.num_layers
    first = config.count("first_k_dense_replace")
    blocks = with_experts(config, mixers, _mixture(config), range(first))
    further = config.within(config.name_of(_FURTHER, "num_mtp_layers"), 0, MAX_LAYERS)
    return decoder(config, blocks, num_unused_layers=further)


def _mixture(config: ConfigReader) -> Experts:
    size, num_groups = config.positive("moe_intermediate_size"), config.positive("n_group")
    choice = Choice(
        config.positive("num_experts_per_tok"),
        Scoring.SIGMOID,
        normalised=config.flag("norm_topk_prob"),
        num_groups=num_groups,
        num_chosen_groups=config.positive("topk_group"),
        scale=config.number("routed_scaling_factor"),
    )
    name = config.name_of("n_routed_experts", "num_local_experts")
    count = config.positive(name)
    if count % num_groups or count // num_groups < 2:
        reason = f"does not divide {count} experts into groups of two or more"
        raise config.unsupported("n_group", reason)
    if choice.num_chosen > choice.num_chosen_groups * (count // num_groups):
        raise config.unsupported("topk_group", "has too few experts for each token")
    shared = size * config.count("n_shared_experts")
    return experts(
        config,
        router(config, choice, name, bias="mlp.gate.e_score_correction_bias"),
        size,
        shared=dense(config, module="mlp.shared_experts", size=shared) if shared else None,
    )


FAMILIES = (
    Family(
        "Glm4MoeForCausalLM",
        describe,
        reads=names(
            """
            hidden_act rms_norm_eps attention_bias use_qk_norm moe_intermediate_size
            num_experts_per_tok n_shared_experts n_routed_experts num_local_experts n_group
            topk_group routed_scaling_factor first_k_dense_replace norm_topk_prob
            num_nextn_predict_layers num_mtp_layers
            """
        ),
        ignores=names("output_router_logits"),
        defaults={
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            HEADS: 96,
            KV_HEADS: 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            _FURTHER: 1,
        },
    ),
)
