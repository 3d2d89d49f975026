"""SmolLM 3: Llama without RoPE in every fourth layer."""

from dataclasses import replace

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, SLIDING, ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    has_bias = config.flag("attention_bias")
    mixer = attention(config, rope(config, theta=2_000_000.0), qkv_bias=has_bias, out_bias=has_bias)
    feed_forward = dense(config, has_bias=config.flag("mlp_bias"))
    turned = _turned_layers(config)
    has_windows = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    types = config.layer_types(lambda layer: SLIDING if has_windows and not turned[layer] else FULL)
    windows = config.windows(types) if has_windows else (None,) * len(types)
    mixers = (
        replace(mixer, rope=mixer.rope if is_turned else None, window=window)
        for is_turned, window in zip(turned, windows, strict=True)
    )
    return decoder(config, tuple(block(config, each, feed_forward) for each in mixers))


def _turned_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Returns which layers rotate queries and keys: `no_rope_layers` has a 1 for those."""
    flags, num_layers = config.get("no_rope_layers"), config.num_layers
    if flags is None:
        interval = config.positive("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) != num_layers or {*map(repr, flags)} - {"0", "1"}:
        raise config.unsupported("no_rope_layers", f"must have a 0 or 1 for {num_layers} layers")
    return tuple(map(bool, flags))


FAMILIES = (
    Family(
        "SmolLM3ForCausalLM",
        describe,
        reads=names(
            """
            hidden_act rms_norm_eps attention_bias mlp_bias use_sliding_window sliding_window
            no_rope_layers no_rope_layer_interval
            """
        ),
        ignores=names("max_window_layers"),
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
)
