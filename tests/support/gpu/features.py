"""The configs of tiny models for every feature that the decoder has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPS = {"hidden_size": 64, "intermediate_size": 96}
"""The sizes of a model whose inputs have whole groups of weights in few bits."""
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(weights: Mapping[str, Any], form: str, inputs: Any, plain: str) -> dict[str, Any]:
    """Returns the quantisation of compressed-tensors' checkpoints; modules named `plain` are
    plain."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": [f"re:.*{plain}"]}
    return {"quantization_config": {**config, "config_groups": {"group_0": group}}}


PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2, biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3, norms of heads": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral, a window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 9,
    },
    "gemma2, soft caps, wide norms on both sides, geglu": {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 9,
    },
    "gemma3, two rotations": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 2,
        "sliding_window": 9,
    },
    "cohere2, parallel halves, LayerNorm, a layer without rotation": {
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window_pattern": 2,
        "sliding_window": 9,
    },
    "glm4, a part turned, neighbours": {"architectures": ["Glm4ForCausalLM"]},
    "olmo2, norms of all heads, none before": {"architectures": ["Olmo2ForCausalLM"]},
    "hunyuan, norms behind the rotation": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "ministral3, growing queries": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "gemma4, larger heads, values that are keys, keys of other layers, inputs of layers": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 5,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "sliding_window": 9,
        "final_logit_softcapping": 3.0,
    },
    "qwen2 experts, some dense, shared, a gate": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 24,
    }
    | EXPERTS,
    "qwen3 experts, normalised": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
    }
    | EXPERTS,
    "gpt-oss experts, sinks, biases, clamped": {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 9,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
    },
    "glm4 experts, groups, a bias": {
        "architectures": ["Glm4MoeForCausalLM"],
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "gemma4 experts, norms of their own": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
    "qwen3.5, a gated delta net, a gate of attention": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
    }
    | DELTA,
    "qwen3-next, experts, by key head": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 24,
    }
    | DELTA
    | EXPERTS,
    "lfm2, short convolutions": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "granite, multipliers": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.6,
    },
}
"""A model for every feature that the decoder has with plain weights."""
IN_FEW_BITS: dict[str, dict[str, Any]] = {
    "qwen2 in int4, some plain, biases, the head": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
    }
    | GROUPS
    | compressed(INT4, "pack-quantized", None, "v_proj"),
    "llama in int4, zero points": {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
        },
    }
    | GROUPS,
    "granite in int8, rounded inputs": {"architectures": ["GraniteForCausalLM"]}
    | compressed(INT8, "int-quantized", TOKENS, "lm_head"),
    "gemma2 in nf4": {
        "architectures": ["Gemma2ForCausalLM"],
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
        },
    }
    | GROUPS,
    "qwen3 experts in fp8": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }
    | EXPERTS,
    "gpt-oss experts in mxfp4": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    | GROUPS,
}
"""Models with weights in few bits, of each format."""
FEATURES = PLAIN | IN_FEW_BITS
