"""The models and cards in the tables of sizing."""

from __future__ import annotations

from typing import Any

GB = 10**9


def _model(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    heads: tuple[int, int],
    max_position_embeddings: int,
    **more: Any,
) -> dict[str, Any]:
    """Returns a config; `heads` are the numbers of query heads, then of key and value heads."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


BENCH_200M = _model("Llama", 8192, 1024, 2816, 16, (16, 4), 2048)
LLAMA_8B = _model("Llama", 128256, 4096, 14336, 32, (32, 8), 131072)
QWEN3_5_08B = _model(
    "Qwen3_5",
    248320,
    1024,
    3584,
    24,
    (8, 2),
    262144,
    head_dim=256,
    tie_word_embeddings=True,
    layer_types=[*["linear_attention"] * 3, "full_attention"] * 6,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
"""Three of four layers are recurrent."""
MODELS = {
    "Qwen3-0.6B": _model(
        "Qwen3", 151936, 1024, 3072, 28, (16, 8), 40960, head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-4B": _model(
        "Qwen3", 151936, 2560, 9728, 36, (32, 8), 40960, head_dim=128, tie_word_embeddings=True
    ),
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-14B": _model("Qwen2", 152064, 5120, 13824, 48, (40, 8), 131072),
    "Qwen3-30B-A3B": _model(
        "Qwen3Moe",
        151936,
        2048,
        6144,
        48,
        (32, 4),
        40960,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "Qwen3-32B": _model("Qwen3", 151936, 5120, 25600, 64, (64, 8), 40960, head_dim=128),
    "half of Llama-3.3-70B": _model(
        "Llama", 128256, 8192, 14336, 80, (32, 4), 131072, head_dim=128
    ),
    "Llama-3.3-70B": _model("Llama", 128256, 8192, 28672, 80, (64, 8), 131072),
}
"""config.json by name. The half is one card's part of each layer if two cards share them."""
SHARED = {
    "Llama-3.3-70B": MODELS["Llama-3.3-70B"],
    "Qwen3-235B-A22B": _model(
        "Qwen3Moe",
        151936,
        4096,
        12288,
        94,
        (64, 4),
        40960,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        norm_topk_prob=True,
    ),
}
"""Models that several ranks compute together."""
CARDS = (16, 24, 40, 48, 80, 141)
"""Nominal gigabytes of cards."""


def card_bytes(gigabytes: int) -> int:
    """Returns the memory that a program sees, which is a little less, for error correction."""
    return gigabytes * GB * 39 // 40
