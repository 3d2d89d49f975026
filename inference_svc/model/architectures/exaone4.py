"""EXAONE 4: a norm after each half and none before it, and norms of each head's queries and keys;
three of four layers may have a window; then only those layers have RoPE."""

from dataclasses import replace

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, norm, rope
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, SLIDING, ConfigReader, every_full
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    head_dim, feed_forward = config.head_dim, dense(config)
    mixer = attention(
        config,
        rope(config),
        q_norm=norm(config, "self_attn.q_norm", head_dim),
        k_norm=norm(config, "self_attn.k_norm", head_dim),
    )
    is_hybrid = config.window is not None
    types = config.layer_types(lambda layer: _kind_of(config, layer) if is_hybrid else FULL)
    mixers = (
        replace(mixer, window=window, rope=mixer.rope if window or not is_hybrid else None)
        for window in config.windows(types)
    )
    blocks = (
        block(
            config,
            each,
            feed_forward,
            attention_norm=None,
            attention_post_norm=norm(config, "post_attention_layernorm"),
            feed_forward_norm=None,
            feed_forward_post_norm=norm(config, "post_feedforward_layernorm"),
        )
        for each in mixers
    )
    return decoder(config, tuple(blocks))


def _kind_of(config: ConfigReader, layer: int) -> str:
    """Returns the kind of a layer by `sliding_window_pattern`: of how many one attends to all, or a
    letter for each in turn, L for a window and G for none, but for the last layer, which attends to
    all."""
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return every_full(config.positive("sliding_window_pattern"))(layer)
    if not pattern or set(pattern) - {"L", "G"}:
        raise config.unsupported("sliding_window_pattern", "must consist of L and G")
    is_full = pattern[layer % len(pattern)] == "G" or layer == config.num_layers - 1
    return FULL if is_full else SLIDING


FAMILIES = (
    Family(
        "Exaone4ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps sliding_window sliding_window_pattern"),
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
)
