"""Command R7B and A: both halves of a layer read one LayerNorm; three of four layers have a window
and RoPE in pairs of neighbours; the fourth has neither."""

from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader, every_full
from inference_svc.model.description import Block, Decoder, Head, Norm, NormKind

_layer_norm = partial(Norm, kind=NormKind.LAYER, is_wide=True)


def describe(config: ConfigReader) -> Decoder:
    has_bias, eps = config.flag("attention_bias"), config.epsilon("layer_norm_eps")
    hidden_size, turned = config.positive("hidden_size"), rope(config, is_interleaved=True)
    feed_forward = dense(config)
    types = config.layer_types(every_full(config.positive("sliding_window_pattern")))

    def layer(window: int | None) -> Block:
        mixer = attention(
            config,
            None if window is None else turned,
            qkv_bias=has_bias,
            out_bias=has_bias,
            window=window,
        )
        return block(
            config,
            mixer,
            feed_forward,
            attention_norm=_layer_norm("input_layernorm", hidden_size, eps),
            feed_forward_norm=None,
            is_parallel=True,
        )

    return decoder(
        config,
        tuple(map(layer, config.windows(types))),
        final_norm=_layer_norm("model.norm", hidden_size, eps),
        head=Head(config.flag("tie_word_embeddings"), config.number("logit_scale")),
    )


FAMILIES = (
    Family(
        "Cohere2ForCausalLM",
        describe,
        reads=names(
            """
            hidden_act layer_norm_eps attention_bias logit_scale sliding_window
            sliding_window_pattern
            """
        ),
        ignores=names("cache_implementation use_parallel_embedding"),
        accepts={
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
        defaults={
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 255001,
            "tie_word_embeddings": True,
        },
    ),
)
