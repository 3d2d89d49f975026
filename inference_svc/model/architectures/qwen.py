"""Qwen 2 and 3: Llama with biases of q, k and v, or with norms of each head's queries and keys;
some layers may attend to a window."""

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
from inference_svc.model.config_keys import names
from inference_svc.model.config_reader import FULL, SLIDING, ConfigReader
from inference_svc.model.description import Attention, Decoder


def describe_qwen2(config: ConfigReader) -> Decoder:
    return _describe(config, attention(config, rope(config), qkv_bias=True))


def describe_qwen3(config: ConfigReader) -> Decoder:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    mixer = attention(
        config,
        rope(config),
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_norm=norm(config, "self_attn.q_norm", head_dim),
        k_norm=norm(config, "self_attn.k_norm", head_dim),
    )
    return _describe(config, mixer)


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

FAMILIES = (
    Family("Qwen2ForCausalLM", describe_qwen2, reads=_READS, defaults=_DEFAULTS),
    Family(
        "Qwen3ForCausalLM",
        describe_qwen3,
        reads=_READS | {"attention_bias"},
        defaults={**_DEFAULTS, "head_dim": 128},
    ),
)
