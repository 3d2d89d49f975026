"""GLM 4: norms on both sides of each half, gate and up in one tensor, and RoPE on half of each
head, in pairs of neighbours."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    norm,
    rope,
    with_windows,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    mixer = attention(
        config,
        rope(config, part=0.5, is_interleaved=True),
        qkv_bias=config.flag("attention_bias"),
    )
    layer = block(
        config,
        mixer,
        dense(config, is_stored_fused=True),
        attention_post_norm=norm(config, "post_self_attn_layernorm"),
        feed_forward_post_norm=norm(config, "post_mlp_layernorm"),
    )
    return decoder(config, with_windows(layer, config.same_window(None)))


FAMILIES = (
    Family(
        "Glm4ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps attention_bias"),
        defaults={
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "eos_token_id": [151329, 151336, 151338],
            "attention_bias": True,
        },
    ),
)
