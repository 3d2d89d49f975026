"""ERNIE 4.5: Llama with RoPE in pairs of neighbours."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    has_bias = config.flag("use_bias")
    turned = rope(config, theta=500_000.0, is_interleaved=True)
    mixer = attention(config, turned, qkv_bias=has_bias, out_bias=has_bias)
    layer = block(config, mixer, dense(config, has_bias=has_bias))
    return decoder(config, with_windows(layer, config.same_window(None)))


FAMILIES = (
    Family(
        "Ernie4_5ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps use_bias"),
        ignores=names("auto_map"),
        accepts={"is_causal": True},
        defaults={
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
)
