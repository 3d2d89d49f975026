"""Families of models, each with every special feature of its configuration switched on."""

from __future__ import annotations

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}

LONGROPE = {
    "pad_token_id": 0,
    "max_position_embeddings": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e3,
        "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0],
        "partial_rotary_factor": 0.75,
    },
}
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 30, "sliding_window": 10, "pad_token_id": 0}
GEMMA4 = {
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    "sliding_window": 10,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
}

QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 1.5,
    "rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False},
}
GLM_MOE = {
    "head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}

MODELS = {
    "llama": ("Llama", {}),
    "llama-one-kv-head-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-no-gqa-biases": (
        "Llama",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-heads-of-288": ("Llama", {"num_attention_heads": 2, "head_dim": 288}),
    "llama-heads-of-576": (
        "Llama",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 576},
    ),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-head-dim": ("Llama", {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "mistral-sliding": ("Mistral", {"sliding_window": 10}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding-from-layer-1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-yarn-rope-bias": (
        "Qwen3",
        {"head_dim": 12, "rope_parameters": YARN | {"rope_theta": 1e6}, "attention_bias": True},
    ),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-no-caps": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    "gemma3-linear-rope": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": LINEAR | {"rope_theta": 2000.0},
            },
            "attention_bias": True,
        },
    ),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-layers-told-nothing": (
        "Gemma4",
        GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4-same-heads-own-values-biases": (
        "Gemma4",
        GEMMA4 | {"global_head_dim": 16, "attention_k_eq_v": False, "attention_bias": True},
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 12,
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "mscale": 1.0}
            | {"original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
        },
    ),
    "ministral3-sliding": ("Ministral3", {"head_dim": 12, "sliding_window": 9}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partial-sliding": (
        "Phi3",
        {
            "pad_token_id": 0,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-longrope-short": ("Phi3", LONGROPE | {"original_max_position_embeddings": 600}),
    "phi3-longrope-long": ("Phi3", LONGROPE | {"original_max_position_embeddings": 50}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3-windows-biases": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 13,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 10}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 10,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN | {"rope_theta": 500.0},
            },
        },
    ),
    "granite": ("Granite", MULTIPLIERS),
    "granite-biases": ("Granite", MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}),
    "glm4": ("Glm4", {"head_dim": 12, "pad_token_id": 0}),
    "glm4-part": (
        "Glm4",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.75},
        },
    ),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 10, "logit_scale": 0.3}),
    "cohere2-biases-last-layer-slides": (
        "Cohere2",
        {"sliding_window": 10, "attention_bias": True, "logit_scale": 2.0},
    ),
    "ernie": ("Ernie4_5", {"head_dim": 12}),
    "ernie-biases": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 10, "pad_token_id": 0}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 12}),
    "hunyuan-alpha-bias": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 7.0}
            | {"factor": 1.0},
        },
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN_MOE | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-windows": (
        "Qwen2Moe",
        QWEN_MOE
        | {"shared_expert_intermediate_size": 40, "use_sliding_window": True}
        | {"sliding_window": 7, "max_window_layers": 1, "norm_topk_prob": True},
    ),
    "lfm2": (
        "Lfm2",
        {"full_attn_idxs": [1], "conv_L_cache": 4, "block_multiple_of": 8, "norm_eps": 1e-4},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        QWEN_MOE
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.5},
    ),
    "lfm2-moe-all-experts-no-bias": (
        "Lfm2Moe",
        QWEN_MOE
        | {"layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0}
        | {"use_expert_bias": False, "norm_topk_prob": False},
    ),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5-moe": ("Qwen3_5Moe", HYBRID | QWEN_MOE | {"shared_expert_intermediate_size": 40}),
    "qwen3-next": (
        "Qwen3Next",
        HYBRID
        | QWEN_MOE
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [2], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3Moe", QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        QWEN_MOE | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "sliding_window": None}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 4, "sliding_window": 10}),
    "olmoe": ("Olmoe", {"num_experts": 10, "num_experts_per_tok": 4}),
    "olmoe-normalised-biases": (
        "Olmoe",
        {"num_experts": 10, "norm_topk_prob": True, "attention_bias": True},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-all-windows": (
        "GptOss",
        GPT_OSS | {"layer_types": ["sliding_attention"] * 3, "attention_bias": False},
    ),
    "glm4-moe": ("Glm4Moe", GLM_MOE),
    "glm4-moe-groups-norms": (
        "Glm4Moe",
        GLM_MOE
        | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "gemma4-moe": (
        "Gemma4",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        | {"moe_intermediate_size": 24, "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0},
    ),
    "gemma4-moe-layers-told": (
        "Gemma4",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        | {"moe_intermediate_size": 24},
    ),
}


TEXT_PARTS = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
"""Families whose models of text alone have another config."""
