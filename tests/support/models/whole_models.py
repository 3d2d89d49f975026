"""Models of several towers, as transformers makes them: small ones by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_FULL = ["full_attention"]
_TEXT = {"head_dim": 12, "pad_token_id": 0, "sliding_window": 10}


def _qwen3_5(**changes: int) -> dict[str, Any]:
    return {
        "text_config": SHAPE
        | {
            "head_dim": 16,
            "full_attention_interval": 3,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        }
        | changes,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 48,
            "num_position_embeddings": 16,
        },
        "image_token_id": 80,
        "video_token_id": 81,
        "vision_start_token_id": 82,
        "vision_end_token_id": 83,
    }


WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": SHAPE | _TEXT | {"query_pre_attn_scalar": 30},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 80,
        "boi_token_index": 81,
        "eoi_token_index": 82,
    },
    "Gemma4": {
        "text_config": SHAPE
        | {
            "head_dim": 12,
            "global_head_dim": 16,
            "pad_token_id": 0,
            "sliding_window": 10,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 89,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention"] * 1 + _FULL * 2,
        },
        "vision_config": {
            **{key: _VISION[key] for key in _VISION if not key.startswith("image")},
            "head_dim": 8,
            "num_key_value_heads": 2,
            "position_embedding_size": 16,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
        "image_token_id": 80,
        "video_token_id": 81,
        "audio_token_id": 82,
    },
    "Qwen3_5": _qwen3_5(),
    "Qwen3_5Moe": _qwen3_5(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
    "Mistral3": {
        "text_config": SHAPE | _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"head_dim": 8, "model_type": "pixtral"},
        "image_token_index": 80,
    },
    "Ministral3": {
        "text_config": SHAPE | _TEXT | {"model_type": "ministral3"},
        "vision_config": _VISION | {"head_dim": 8, "model_type": "pixtral"},
        "image_token_index": 80,
        "tie_word_embeddings": False,
    },
}
"""The config of each wrapper, by what its models are called."""


def whole_config(
    name: str, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None
) -> Any:
    """Returns the config of a wrapper with these values in its parts' configs."""
    values = WHOLE[name]
    parts = {
        "text_config": values["text_config"] | dict(text or {}),
        "vision_config": values["vision_config"] | dict(vision or {}),
    }
    return getattr(transformers, f"{_family(name)}Config")(**(values | parts))


def whole_class(name: str) -> Any:
    """Returns the wrapper's class."""
    return getattr(transformers, f"{_family(name)}ForConditionalGeneration")


def make_whole(name: str, folder: Path) -> Any:
    """Saves a small random model of several towers in fp32, and returns it."""
    torch.manual_seed(0)
    model = whole_class(name)._from_config(whole_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return model


def _family(name: str) -> str:
    return "Mistral3" if name == "Ministral3" else name
